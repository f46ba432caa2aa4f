"""The FlashInfer release that is tested, and what tests of one kind of wrapper are marked with."""

import importlib.metadata
import os

import pytest


def _base() -> str:
    if given := os.environ.get("MLA_FP8KV_BASE"):
        return given
    try:
        return importlib.metadata.version("flashinfer-python").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "0.7.2"


BASE = _base()
# Up to 0.6, the MLA wrapper is one class in flashinfer/mla.py with flat arguments.
FLAT = tuple(map(int, BASE.split(".")[:2])) < (0, 7)

planned_wrapper_only = pytest.mark.skipif(
    FLAT, reason=f"the MLA wrapper of FlashInfer {BASE} has no planned backends and contracts"
)
flat_wrapper_only = pytest.mark.skipif(
    not FLAT, reason=f"the MLA wrapper of FlashInfer {BASE} plans by backends and contracts"
)
