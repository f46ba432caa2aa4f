"""Finds compilers: an installed CUDA toolkit, or the compiler packages of the index."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mla_fp8kv_build import env, nvrtc
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import COMPILERS

_DEFAULT_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit; `home` has bin/nvcc and include/."""

    home: Path
    version: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"nvcc {self.version}"

    @property
    def nvcc(self) -> Path:
        """The compiler driver."""
        return self.home / "bin" / "nvcc"

    @property
    def libraries(self) -> Path:
        """The folder with libcudart.so.<major>."""
        lib64 = self.home / "lib64"
        return lib64 if lib64.is_dir() else self.home / "lib"

    def architectures(self) -> set[str]:
        """Numbers N for which this nvcc has sm_N."""
        listed = _run(self.nvcc, "--list-gpu-code")
        return set(re.findall(r"sm_(\d+)\b", listed))


@dataclass(frozen=True)
class Nvrtc:
    """The runtime compiler of a CUDA release; see nvrtc.py."""

    library: Path
    version: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"NVRTC {self.version}"

    @property
    def command(self) -> list[str]:
        """The program that loads it, up to its arguments."""
        return [sys.executable, nvrtc.__file__, str(self.library)]

    def architectures(self) -> set[str]:
        """Numbers N for which this release has sm_N."""
        return set(_run(*self.command).split())


def find() -> Toolkit:
    """The toolkit of CUDA_HOME, PATH or /usr/local/cuda; else one from the package index."""
    for home in _candidates():
        # The header tells a toolkit from a wrapper script that lies on the PATH.
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return _toolkit(home)
    return _toolkit(_index_home(env.ensure("nvcc")))


def releases() -> list[str]:
    """CUDA releases whose compilers can be had from the index, oldest first."""
    return sorted((path.stem for path in COMPILERS.glob("*.txt")), key=_numbers)


def of_release(release: str) -> Toolkit | Nvrtc:
    """The compiler of a CUDA release, from the package index."""
    if release not in releases():
        raise BuildError(
            f"CUDA {release} is not among the compilers; they are {', '.join(releases())}."
        )
    python = env.ensure(f"cuda-{release}")
    libraries = _packages(python, "cuda_nvrtc/lib/libnvrtc.so.*")
    if not libraries:
        return _toolkit(_index_home(python))
    pinned = re.search(r"==([\d.]+)", (COMPILERS / f"{release}.txt").read_text())
    return Nvrtc(libraries[0], pinned.group(1))


def _packages(python: Path, pattern: str) -> list[Path]:
    """What NVIDIA's packages in the environment of `python` have under this name."""
    return list(python.parent.parent.glob(f"lib/python*/site-packages/nvidia/{pattern}"))


def _index_home(python: Path) -> Path:
    homes = _packages(python, "cu13")
    if not homes:
        raise BuildError("The compiler packages of the index have no nvidia/cu13 folder.")
    # Their nvcc links with what is in lib64, while the packages fill lib.
    lib64 = homes[0] / "lib64"
    if not lib64.exists():
        lib64.symlink_to("lib")
    return homes[0]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _candidates() -> list[Path]:
    candidates = [
        Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path).resolve().parents[1])
    return [*candidates, _DEFAULT_HOME]


def _toolkit(home: Path) -> Toolkit:
    release = re.search(r"release (\d+\.\d+), V([\d.]+)", _run(home / "bin" / "nvcc", "--version"))
    if not release:
        raise BuildError(f"{home}/bin/nvcc does not say its version.")
    return Toolkit(home, release.group(2))


def _run(program: Path | str, *arguments: str) -> str:
    try:
        return subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{program} {' '.join(arguments)} failed: {error}.") from error


def tvm_ffi_includes(python: Path) -> list[Path]:
    """The header folders of apache-tvm-ffi in the environment of `python`."""
    program = (
        "from tvm_ffi import libinfo; "
        "print(libinfo.find_include_path()); print(libinfo.find_dlpack_include_path())"
    )
    return [Path(line) for line in _run(python, "-c", program).splitlines()]
