"""File helpers that never leave something half-made behind: write aside, then rename."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from mla_fp8kv_build.errors import BuildError

_PARTIAL = ".partial-"


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_tree(paths: Iterable[Path], root: Path) -> str:
    """Hex SHA-256 over the names (relative to `root`) and bytes of files, in sorted order."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


def source_files(directory: Path) -> list[Path]:
    """The files below `directory` that are sources: no bytecode, no tool caches."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and not any(
            part == "__pycache__" or part.startswith(".")
            for part in path.relative_to(directory).parts
        )
    )


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for another run that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A fresh directory to fill; it replaces `final` when the block ends without an error.

    What a killed run left beside `final` is removed first. Callers hold the lock of their area.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{_PARTIAL}{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A path to write to; it replaces `final` when the block ends without an error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{_PARTIAL}{final.name}")
    try:
        yield partial
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def need_space(directory: Path, gigabytes: float, purpose: str) -> None:
    """Refuse to start what cannot end: fewer than `gigabytes` free where `directory` is."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free / 1e9
    if free < gigabytes:
        raise BuildError(
            f"Disk full: {purpose} needs {gigabytes:g} GB in {directory}, which has {free:.1f} GB."
        )


@contextlib.contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """An empty directory that is gone after the block; a killed run's remains go first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
