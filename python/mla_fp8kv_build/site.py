"""The built wheel, unpacked where tests and tools of this checkout import it from."""

import zipfile
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.paths import BUILD
from mla_fp8kv_build.pin import Pin


def unpacked(pin: Pin, wheel: Path) -> Path:
    """A folder for PYTHONPATH with the contents of `wheel`; unpacked when the wheel changed.

    Environments are shared between checkouts and so hold no wheel of any of them.
    """
    directory = BUILD / f"site-{pin.version}"
    stamp = directory / ".wheel.sha256"
    wanted = files.sha256(wheel)
    with files.lock(BUILD / "site.lock"):
        if not (stamp.is_file() and stamp.read_text() == wanted):
            files.need_space(BUILD, 1, "unpacking the wheel")
            with files.new_directory(directory) as fresh:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(fresh)
                (fresh / stamp.name).write_text(wanted)
    return directory
