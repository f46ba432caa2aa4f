"""Compiles C++ of this folder into shared libraries, cached by the hash of all that goes in."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# mutations.py points this at changed copies.
KERNEL = Path(
    os.environ.get("MLA_FP8KV_KERNEL_FOLDER") or HERE.parents[1] / "python" / "mla_fp8kv" / "kernel"
)
# _FORTIFY_SOURCE would take the jump from one fiber's stack to another for an overflow.
FLAGS = (
    "-std=c++17 -O1 -fPIC -shared -pthread -ftls-model=initial-exec "
    "-Wno-unknown-pragmas -U_FORTIFY_SOURCE -DMLA_FP8KV_HOST"
).split()


def cache_folder() -> Path:
    """Outside the tree, so that a fresh clone finds what another one compiled."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    folder = Path(base) / "mla_fp8kv" / "host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_library(source: str, defines: dict[str, int | str]) -> Path:
    """The shared library of `source`, a file name in this folder.

    Raises RuntimeError with the compiler's words if it does not compile.
    """
    compiler = os.environ.get("CXX", "g++")
    flags = FLAGS + [f"-D{name}={value}" for name, value in sorted(defines.items())]
    digest = hashlib.sha256(repr((compiler, flags, source)).encode())
    for folder in (HERE, KERNEL):
        for file in sorted(folder.iterdir()):
            if file.suffix in (".h", ".cuh", ".cpp"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    library = cache_folder() / f"{Path(source).stem}-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [compiler, *flags, f"-I{HERE}", f"-I{KERNEL}", str(HERE / source), "-o", unfinished]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        os.unlink(unfinished)
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
    os.replace(unfinished, library)
    return library


def load_library(source: str, defines: dict[str, int | str]) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_library(source, defines)))
