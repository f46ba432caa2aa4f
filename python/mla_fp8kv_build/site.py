"""The built wheel, unpacked where tests and tools of this checkout import it from."""

import shutil
import zipfile
from pathlib import Path

from mla_fp8kv_build import files
from mla_fp8kv_build.paths import BUILD
from mla_fp8kv_build.pin import Pin

_KEPT = 3


def unpacked(pin: Pin, wheel: Path) -> Path:
    """A folder for PYTHONPATH with the contents of `wheel`, unpacked once for the same wheel.

    Environments are shared between checkouts and so hold no wheel of any of them. The latest few
    folders stay, so that a run in progress keeps its own while another one builds.
    """
    directory = BUILD / "site" / f"{pin.version}-{files.sha256(wheel)[:12]}"
    with files.lock(BUILD / "site.lock"):
        if not directory.is_dir():
            files.need_space(BUILD, 1, "unpacking the wheel")
            with files.new_directory(directory) as fresh, zipfile.ZipFile(wheel) as archive:
                archive.extractall(fresh)
        directory.touch()
        same_base = directory.parent.glob(f"{pin.version}-*")
        for old in sorted(same_base, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(old)
    return directory
