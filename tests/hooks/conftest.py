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

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "tests" / "gpu"))  # the table of refusals is the GPU tests' own
sys.path.append(str(REPO / "python"))  # last, so that a wheel is what is tested

import stand_ins  # noqa: E402
import upstream_tree  # noqa: E402

torch = pytest.importorskip("torch", reason="the hooks run on torch tensors")

from compiled import binding, bound, compiled, loaded  # noqa: E402, F401 (fixtures)


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

        wrapper = sys.modules[flashinfer.mla.BatchMLAPagedAttentionWrapper.__module__]
        assert "mla_fp8kv" in Path(wrapper.__file__).read_text()
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
        """What 0.7 calls on upstream's modules."""
        return self.plan(*args), 0

    def run(self, *args):
        self.runs.append(args)


@pytest.fixture
def unpinned(monkeypatch):
    """Wrappers pin memory, which torch refuses where there is no driver."""
    empty = torch.empty

    def empty_unpinned(*args, pin_memory=False, **kwargs):
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty_unpinned)


@pytest.fixture
def device(flashinfer, unpinned, monkeypatch):
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

    def capability(_device=None):
        return pretended.sm

    for place, name, value in stand_ins.upstream(capability, pretended.module):
        monkeypatch.setattr(place, name, value)
    monkeypatch.setattr(mla_fp8kv.capability, "compute_capability", capability)
    monkeypatch.setattr(
        mla_fp8kv.jit, "get_module", lambda dtype, kpe: pretended.module("fp8kv", dtype, kpe)
    )
    return pretended
