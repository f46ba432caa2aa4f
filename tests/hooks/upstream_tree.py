"""Find the pinned sdist and unpack the parts of it that the hook tests import or compare."""

import os
import tarfile
from pathlib import Path

SDIST = "flashinfer_python-0.7.2.tar.gz"


def find_sdist() -> Path | None:
    """FLASHINFER_SDIST, or the file in the build's download cache."""
    if given := os.environ.get("FLASHINFER_SDIST"):
        return Path(given)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("MLA_FP8KV_CACHE") or base / "mla-fp8kv")
    kept = cache / "downloads" / SDIST
    return kept if kept.is_file() else None


def series(folder: Path) -> list[str]:
    """Patch names of a series file, in order, comments left out."""
    lines = (folder / "series").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


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
