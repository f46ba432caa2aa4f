"""Unpacks a verified sdist into the pristine tree, all of it or nothing."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.pin import Pin

_STAMP = ".sdist.sha256"


def unpacked(pin: Pin) -> bool:
    """True when the pristine tree is there and came from the pinned sdist."""
    stamp = pin.pristine / _STAMP
    return stamp.is_file() and stamp.read_text() == pin.sha256


def unpack(pin: Pin, sdist: Path) -> None:
    """Make `pin.pristine` from the sdist."""
    files.need_space(pin.pristine.parent, 1, "unpacking")
    with files.new_directory(pin.pristine) as directory, tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(directory, members=_without_top(archive, pin), **safe)
        (directory / _STAMP).write_text(pin.sha256)


def _without_top(archive: tarfile.TarFile, pin: Pin) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        top, _, rest = member.name.partition("/")
        if top != pin.stem:
            raise BuildError(f"{pin.sdist} has {member.name} outside its folder {pin.stem}.")
        if rest:
            member.name = rest
            yield member
