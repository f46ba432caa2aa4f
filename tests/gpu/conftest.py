"""Tests of the installed package on a GPU, through the public wrapper only.

They run from the repository and from the offline bundle alike: nothing here imports the build.
"""

import warnings

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU of compute capability 8.0 or newer")
    # SGLang's calls are upstream's deprecated forms; each wrapper says so once.
    config.addinivalue_line("filterwarnings", "ignore:.*MLA:DeprecationWarning")


def _no_gpu_reason() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            return "no CUDA GPU on this machine"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
    return None


def pytest_collection_modifyitems(items):
    reason = _no_gpu_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
