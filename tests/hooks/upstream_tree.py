"""The pinned sdist, and the parts of it that the hook tests import or compare."""

import os
import tarfile
from pathlib import Path

from flashinfer_base import BASE

SDIST = f"flashinfer_python-{BASE}.tar.gz"


def find_sdist() -> Path | None:
    """FLASHINFER_SDIST, or the file in the build's download cache."""
    if given := os.environ.get("FLASHINFER_SDIST"):
        return Path(given)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("MLA_FP8KV_CACHE") or base / "mla-fp8kv")
    kept = cache / "downloads" / SDIST
    return kept if kept.is_file() else None


def apply_series(folder: Path, tree: Path) -> None:
    """Apply the patches of `folder` to `tree`, as strictly as the build does."""
    from mla_fp8kv_build import patch

    contents: patch.Contents = {}
    for one in patch.read_series(folder):
        patch.apply(one, contents, lambda path: (tree / path).read_text())
    for path, text in contents.items():
        (tree / path).write_text(text)


def unpack(sdist: Path, target: Path) -> None:
    """Write the package's Python files and the MLA modules' sources, laid out as installed."""
    with tarfile.open(sdist, "r|gz") as archive:
        for member in archive:
            path = Path(*Path(member.name).parts[1:])
            if not member.isfile():
                continue
            if path.parts[0] == "flashinfer" and path.suffix == ".py":
                place = target / path
            elif path.parts[0] == "csrc" and path.name.startswith("batch_mla"):
                place = target / "flashinfer" / "data" / path
            else:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.extractfile(member).read())
