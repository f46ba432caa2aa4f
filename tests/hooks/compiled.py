"""The module compiled by FlashInfer's own just-in-time build, and loaded without a GPU."""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mla_fp8kv
import pytest
import torch
from mla_fp8kv_build import toolchain
from mla_fp8kv_build.errors import BuildError

PACKAGE = Path(mla_fp8kv.__file__).resolve().parents[1]
FAKE_CUDART = Path(__file__).with_name("fake_cudart.c")

LOAD = """
import threading, torch, mla_fp8kv.jit

def use():
    mla_fp8kv.jit.get_module(torch.float8_e4m3fn, 64).forget(torch.zeros(1))
    print("usable", flush=True)

threads = [threading.Thread(target=use) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def settings(flashinfer, workspace: Path) -> dict[str, str]:
    """Environment of a process that imports the package and compiles into `workspace`."""
    root = Path(flashinfer.__file__).resolve().parents[1]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(PACKAGE)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    }


def module_directory(workspace: Path) -> Path:
    """Where the module of e4m3 is compiled below `workspace`."""
    from flashinfer.jit import env
    from mla_fp8kv.jit import module_uri

    cache = env.FLASHINFER_JIT_DIR.relative_to(env.FLASHINFER_BASE_DIR)
    return workspace / cache / module_uri(torch.float8_e4m3fn, 64)


def shared_library(source: Path | str, path: Path, *options: str) -> None:
    name = f"-Wl,-soname,{path.name}"
    command = ["gcc", "-shared", "-fPIC", name, "-x", "c", str(source), "-o", str(path), *options]
    subprocess.run(command, check=True)


@dataclass(frozen=True)
class Compiled:
    """What two processes made that both wanted the module at once.

    Attributes:
        library: the module.
        outputs: (exit status, stdout, stderr) of each process.
        compiler_calls: how often nvcc was called.
        cudart: name by which the module asks for the CUDA runtime.
    """

    library: Path
    outputs: list
    compiler_calls: int
    cudart: str


@pytest.fixture(scope="session")
def compiled(flashinfer, tmp_path_factory) -> Compiled:
    try:
        toolkit = toolchain.find()
    except BuildError as error:
        pytest.skip(f"no nvcc: {error}")
    folder = tmp_path_factory.mktemp("compiled")
    # This machine may have no driver to link with, so an empty libcuda stands in.
    shared_library(os.devnull, folder / "libcuda.so.1")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    calls, nvcc = folder / "nvcc-calls", folder / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho call >> {calls}\nexec {toolkit.nvcc} "$@"\n')
    nvcc.chmod(0o755)
    environment = settings(flashinfer, folder) | {
        "CUDA_HOME": str(toolkit.home),
        "FLASHINFER_NVCC": str(nvcc),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}",
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), str(toolkit.libraries)]),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", LOAD]
    both = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    texts = [process.communicate(timeout=500) for process in both]
    directory = module_directory(folder)
    return Compiled(
        directory / f"{directory.name}.so",
        [(process.returncode, *text) for process, text in zip(both, texts, strict=True)],
        len(calls.read_text().split()),
        f"libcudart.so.{toolkit.version.partition('.')[0]}",
    )


class Binding:
    """The compiled module on CPU tensors, above a CUDA runtime that counts launches."""

    def __init__(self, module, runtime) -> None:
        self.module = module
        self._launches = ctypes.c_int.in_dll(runtime, "launches")
        self._capturing = ctypes.c_int.in_dll(runtime, "capturing")

    def launched(self) -> int:
        """How many kernels since the last call."""
        count, self._launches.value = self._launches.value, 0
        return count

    def capture(self, on: bool) -> None:
        """Whether streams say that they are being captured."""
        self._capturing.value = int(on)


class BoundModule:
    """The binding in the place of the loaded module; keeps what plan() and run() accepted."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.plans = []
        self.runs = []

    def forget(self, int_workspace) -> None:
        self.binding.module.forget(int_workspace)

    def plan(self, *arguments):
        info, _ = self.binding.module.plan(*arguments)
        self.plans.append(arguments)
        return info

    def run(self, *arguments) -> None:
        self.binding.module.run(*arguments)
        self.runs.append(arguments)


@pytest.fixture(scope="session")
def loaded(compiled, tmp_path_factory) -> Binding:
    if torch.version.cuda:
        pytest.skip("this PyTorch brings the real CUDA runtime")
    assert compiled.library.is_file(), compiled.outputs
    import tvm_ffi

    folder = tmp_path_factory.mktemp("runtime")
    versions = folder / "versions.map"
    versions.write_text(f"{compiled.cudart} {{ global: *; }};\n")
    shared_library(
        FAKE_CUDART, folder / compiled.cudart, f"-Wl,--version-script={versions}", "-Werror"
    )
    shared_library(os.devnull, folder / "libcuda.so.1")
    # Loaded first and by their names, they are what the module finds.
    runtime = ctypes.CDLL(str(folder / compiled.cudart), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    return Binding(tvm_ffi.load_module(str(compiled.library)), runtime)


@pytest.fixture
def binding(loaded) -> Binding:
    loaded.capture(False)
    loaded.launched()  # those of the test before
    return loaded


@pytest.fixture
def bound(device, binding) -> BoundModule:
    """The compiled binding behind the wrapper, for e4m3 with 64 rope dims."""
    return device.modules.setdefault(("fp8kv", torch.float8_e4m3fn, 64), BoundModule(binding))
