"""The patched package on a machine without a GPU, and the pristine tree to compare with.

Under `./build.sh test` the package is the built wheel's. Without one, the patches are applied to
the sdist of FLASHINFER_SDIST or of the build's download cache. A recording stand-in takes the place
of the compiled module, and the compute capability is the one a test asks for.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import upstream_tree

torch = pytest.importorskip("torch", reason="the hooks run on torch tensors")

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "tests" / "gpu"))  # the table of refusals is the GPU tests' own
sys.path.append(str(REPO / "python"))  # last, so that a wheel is what is tested


def pytest_configure(config):
    # SGLang's calls are upstream's deprecated forms; each wrapper says so once.
    config.addinivalue_line("filterwarnings", "ignore:.*MLA:DeprecationWarning")


@dataclass(frozen=True)
class Trees:
    """Folders with the package `flashinfer`: upstream's, and the same with the series applied."""

    pristine: Path
    patched: Path


@pytest.fixture(scope="session")
def trees(tmp_path_factory) -> Trees:
    sdist = upstream_tree.find_sdist()
    if sdist is None:
        pytest.skip(f"no {upstream_tree.SDIST}: set FLASHINFER_SDIST or run ./build.sh once")
    made = Trees(tmp_path_factory.mktemp("pristine"), tmp_path_factory.mktemp("patched"))
    upstream_tree.unpack(sdist, made.pristine)
    upstream_tree.unpack(sdist, made.patched)
    upstream_tree.apply_series(REPO / "patches" / upstream_tree.BASE, made.patched)
    return made


@pytest.fixture(scope="session")
def flashinfer(request, tmp_path_factory):
    """The patched package, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        if "MLA_FP8KV_WHEEL" not in os.environ:
            if "flashinfer" in sys.modules:
                pytest.skip("another flashinfer is imported: run tests/hooks on its own")
            patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("workspace")))
            patch.syspath_prepend(str(request.getfixturevalue("trees").patched))
        import flashinfer.mla

        assert "mla_fp8kv" in Path(flashinfer.mla._batch_mla._wrapper.__file__).read_text()
        yield flashinfer


class RecordingModule:
    """Stands in for a compiled MLA module: records what it is called with, computes nothing."""

    def __init__(self, key):
        self.key = key
        self.plans = []
        self.runs = []
        self.forgotten = []

    def forget(self, int_workspace):
        self.forgotten.append(int_workspace)

    def plan(self, *args):
        self.plans.append(args)
        return [len(self.plans)]

    def plan_with_staged_workspace_bytes(self, *args):
        return self.plan(*args), 0

    def run(self, *args):
        self.runs.append(args)


@pytest.fixture
def device(flashinfer, monkeypatch):
    """Control of the pretended device: `device.sm = (major, minor)`, `device.modules` by key."""

    class Device:
        sm = (9, 0)
        modules: dict

        def module(self, *key):
            return self.modules.setdefault(key, RecordingModule(key))

    pretended = Device()
    pretended.modules = {}
    import mla_fp8kv.capability
    import mla_fp8kv.jit
    from flashinfer.mla._batch_mla import _auto_policy, _wrapper
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    def capability(_device=None):
        return pretended.sm

    monkeypatch.setattr(mla_fp8kv.capability, "compute_capability", capability)
    for module in (_auto_policy, _wrapper):
        monkeypatch.setattr(module, "_get_compute_capability", capability)
    monkeypatch.setattr(_fa_common, "get_compute_capability", capability)
    for module in (_fa_common, _auto_policy):
        monkeypatch.setattr(module, "is_sm90a_supported", lambda _: pretended.sm[0] == 9)
    monkeypatch.setattr(_auto_policy, "is_sm120a_supported", lambda _: pretended.sm == (12, 0))
    monkeypatch.setattr(_auto_policy, "is_sm121a_supported", lambda _: pretended.sm == (12, 1))
    monkeypatch.setattr(_fa_common, "get_device_sm_count", lambda _: 132)
    monkeypatch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda _: (233472, 232448))
    for module in (fa2_backend, fa3_backend):
        monkeypatch.setattr(module, "get_batch_mla_module", pretended.module)
    monkeypatch.setattr(
        mla_fp8kv.jit, "get_module", lambda dtype, kpe: pretended.module("fp8kv", dtype, kpe)
    )
    empty = torch.empty

    def empty_unpinned(*args, pin_memory=False, **kwargs):
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty_unpinned)
    return pretended
