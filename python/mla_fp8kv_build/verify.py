"""Compares a file's SHA-256 with the pin."""

from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.pin import Pin


def verify(path: Path, pin: Pin) -> None:
    """Refuse a file whose bytes are not the pinned ones."""
    found = files.sha256(path)
    if found != pin.sha256:
        raise BuildError(f"The hash of {path} differs: pinned is {pin.sha256}, found is {found}.")
