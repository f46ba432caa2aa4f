"""Compiles C++ of this folder into shared libraries, cached by the hash of all that goes in."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# mutations.py points this at changed copies.
KERNEL = Path(
    os.environ.get("MLA_FP8KV_KERNEL_FOLDER") or HERE.parents[1] / "python" / "mla_fp8kv" / "kernel"
)
# -O1, because compiling takes longer than running. _FORTIFY_SOURCE would take the jump from one
# fiber's stack to another for an overflow.
FLAGS = (
    "-std=c++17 -O1 -fPIC -shared -pthread -ftls-model=initial-exec "
    "-Wno-unknown-pragmas -U_FORTIFY_SOURCE -DMLA_FP8KV_HOST"
).split()

KEEP_SECONDS = 3 * 24 * 3600
DOES_NOT_COMPILE = "does not compile"  # mutations.py looks for it


def cache_folder() -> Path:
    """Beside what build.sh caches, outside the tree: a fresh clone finds what another compiled."""
    moved = os.environ.get("MLA_FP8KV_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = (Path(moved) if moved else Path(base) / "mla-fp8kv") / "host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def forget_old_libraries() -> None:
    """Every change of the kernel leaves libraries that nobody asks for again."""
    for library in cache_folder().iterdir():
        if time.time() - library.stat().st_mtime > KEEP_SECONDS:
            library.unlink(missing_ok=True)


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
        os.utime(library)
        return library
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [compiler, *flags, f"-I{HERE}", f"-I{KERNEL}", str(HERE / source), "-o", unfinished]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        os.unlink(unfinished)
        words = f"{' '.join(command)}\n{result.stderr[:4000]}"
        raise RuntimeError(f"{source} {DOES_NOT_COMPILE}:\n{words}")
    os.replace(unfinished, library)
    return library


def load_library(source: str, defines: dict[str, int | str]) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_library(source, defines)))
