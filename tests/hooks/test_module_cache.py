"""The cache of compiled modules: written by several at once, read-only, full, or no directory.

Everything here happens in processes of its own: FlashInfer reads its settings on import.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import module_directory, settings

SAY_WHY_NOT = """
import torch, mla_fp8kv.jit
try:
    mla_fp8kv.jit.get_module(torch.float8_e4m3fn, 64)
except Exception as error:
    print(f"{type(error).__name__}: {error}".splitlines()[0])
"""


@pytest.fixture
def setting(flashinfer, tmp_path):
    """Environment of a process that compiles into tmp_path/workspace."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return settings(flashinfer, tmp_path / "workspace") | {"TMPDIR": str(temporary)}


@pytest.fixture
def directory(flashinfer, tmp_path) -> Path:
    """Where the module of `setting` is compiled."""
    return module_directory(tmp_path / "workspace")


def run(code, setting, *before) -> str:
    command = [*before, sys.executable, "-c", code]
    finished = subprocess.run(command, env=setting, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return finished.stdout.strip()


def fake_toolkit(home: Path, compiling: str) -> str:
    """A CUDA toolkit whose compiler runs a line of shell."""
    version = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; else {compiling}; fi\n')
    nvcc.chmod(0o755)
    return str(home)


def test_two_processes_and_their_threads_compile_at_once(compiled):
    """One compiles, the others wait and load what it made."""
    for status, out, err in compiled.outputs:
        assert status == 0 and out.split() == ["usable"] * 2, err[-2000:]
    assert compiled.compiler_calls == 2, "each of the two sources is compiled once"


@pytest.fixture
def mounts():
    """Command prefix that runs shell commands as root of a mount namespace of its own first."""
    prefix = ["unshare", "--mount", "--map-root-user"]
    probe = "mount -t tmpfs none /tmp"
    if (
        not shutil.which("unshare")
        or subprocess.run([*prefix, "sh", "-c", probe], stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("no mount namespaces here")
    return lambda script: [*prefix, "sh", "-ec", f'{script}\nexec "$@"', "sh"]


def sentence(name: str, directory: Path, reason: str, variable: str) -> str:
    return (
        f"RuntimeError: The FP8 MLA module {name} cannot be compiled: 16 MB cannot be written to "
        f"{directory} ({reason}); set {variable} to a directory that has room and can be written."
    )


def test_a_read_only_cache(setting, directory, mounts):
    cache = directory.parent
    cache.mkdir(parents=True)
    read_only = mounts(f"mount --bind {cache} {cache}\nmount -o remount,bind,ro {cache}")
    assert run(SAY_WHY_NOT, setting, *read_only) == sentence(
        directory.name, directory, "Read-only file system", "FLASHINFER_WORKSPACE_BASE"
    )


@pytest.mark.parametrize("variable", ["FLASHINFER_WORKSPACE_BASE", "TMPDIR"])
def test_a_full_disk(setting, directory, mounts, tmp_path, variable):
    """The compiler runs into it: its own words come from deep inside ninja's output."""
    full = directory if variable == "FLASHINFER_WORKSPACE_BASE" else Path(setting["TMPDIR"])
    full.mkdir(parents=True, exist_ok=True)
    compiling = f"head -c 2000000 /dev/zero > {full}/intermediate"
    setting["CUDA_HOME"] = fake_toolkit(tmp_path / "cuda", compiling)
    one_megabyte = mounts(f"mount -t tmpfs -o size=1m none {full}")
    assert run(SAY_WHY_NOT, setting, *one_megabyte) == sentence(
        directory.name, full, "No space left on device", variable
    )


def test_a_file_where_the_directory_should_be(setting, directory):
    directory.parent.parent.mkdir(parents=True)
    directory.parent.touch()
    assert run(SAY_WHY_NOT, setting) == sentence(
        directory.name, directory, "Not a directory", "FLASHINFER_WORKSPACE_BASE"
    )


def test_other_failures_are_not_blamed_on_the_cache(setting, tmp_path):
    setting["CUDA_HOME"] = fake_toolkit(tmp_path / "cuda", "exit 1")
    assert run(SAY_WHY_NOT, setting) == "RuntimeError: Ninja build failed. Ninja output:"
    setting["PATH"] = str(tmp_path)
    said = run(SAY_WHY_NOT, setting)
    assert said == "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"
