"""Where things are: the checkout, and the cache directory outside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "mla_fp8kv"
BUILD = ROOT / "build"
DIST = ROOT / "dist"
# What to install for each CUDA release that `resources` can compile with.
COMPILERS = ROOT / "python" / "mla_fp8kv_build" / "compilers"


def cache() -> Path:
    """The directory for downloads and environments; MLA_FP8KV_CACHE moves it."""
    moved = os.environ.get("MLA_FP8KV_CACHE")
    if moved:
        return Path(moved).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mla-fp8kv"
