"""Facts about installed packages, found without importing them."""

import importlib.metadata
import importlib.util
from pathlib import Path


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_dir(name: str) -> Path | None:
    """Folder of a top-level package, found without importing it, or None."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def flashinfer_is_ours() -> bool:
    """Whether the FlashInfer that would be imported calls this package when MLA plans for FP8."""
    root = package_dir("flashinfer")
    if root is None:
        return False
    # 0.6 keeps the MLA wrapper in mla.py, 0.7 in the package mla.
    files = [root / "mla.py", *sorted((root / "mla").rglob("*.py"))]
    return any(file.is_file() and "mla_fp8kv" in file.read_text("utf-8") for file in files)
