"""SGLang's real package on a CPU, and its own load_plugins(), started afresh for each test.

The environment has sglang and our wheel: `./build.sh test --sglang` makes it and runs this folder.
By hand: python -m pip install -r requirements-sglang.txt, then the wheel with --no-deps
--force-reinstall, then pytest tests/sglang.
"""

import importlib
import importlib.metadata
import logging
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Last, so that an installed wheel is what is tested; the tests of text alone do without one.
sys.path.append(str(Path(__file__).parents[2] / "python"))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # flashinfer_base

GROUP = "sglang.srt.plugins"
SLOTS = 4096
WRAPPERS = {
    "BatchMLAPagedAttentionWrapper": "CpuMlaWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper": "RaggedWrapper",
}


@pytest.fixture(scope="session")
def sglang_config():
    """SGLang's own dummy configuration, published as a server would."""
    pytest.importorskip("sglang", reason="needs the sglang environment: ./build.sh test --sglang")
    points = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    assert "mla_fp8kv" in points, f"our wheel is not installed beside sglang, found {points}"
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args():
        yield


@pytest.fixture
def module(sglang_config, monkeypatch):
    """The real backend module with FlashInfer's wrappers stood in for; all hooks are undone."""
    import stand_in
    from mla_fp8kv import sglang as plugin
    from sglang.srt import plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    module = importlib.import_module("sglang.srt.layers.attention.flashinfer_mla_backend")
    # Without a GPU the module does not import them, so the names are new.
    for name, wrapper in WRAPPERS.items():
        monkeypatch.setattr(module, name, getattr(stand_in, wrapper), raising=False)
    for name in ("plans", "runs"):
        monkeypatch.setattr(stand_in.CpuMlaWrapper, name, [])
    # One process runs many servers' worth of start-ups here: begin and end without any trace.
    init = module.FlashInferMLAAttnBackend.__init__
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(plugin, "_said", set())
    monkeypatch.setattr(plugin, "_tried", {})
    monkeypatch.setenv("SGLANG_PLUGINS", "mla_fp8kv")
    HookRegistry.reset()
    with stand_in.OnCpu():
        yield module
    HookRegistry.reset()
    module.FlashInferMLAAttnBackend.__init__ = init


@pytest.fixture
def edited_module(module, monkeypatch, tmp_path):
    """Makes the backend module from an edited text and puts it where SGLang finds it."""

    def make(text: str) -> types.ModuleType:
        file = tmp_path / "flashinfer_mla_backend.py"
        file.write_text(text, "utf-8")
        spec = importlib.util.spec_from_file_location(module.__name__, file)
        edited = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, edited)
        parent, _, name = module.__name__.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], name, edited)
        spec.loader.exec_module(edited)
        for wrapper in WRAPPERS:
            monkeypatch.setattr(edited, wrapper, getattr(module, wrapper), raising=False)
        return edited

    return make


@pytest.fixture
def said(caplog):
    """The plug-in's log lines so far, as (level name, text)."""
    caplog.set_level(logging.INFO, logger="mla_fp8kv.sglang")
    return lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "mla_fp8kv.sglang"
    ]


@pytest.fixture
def load(module):
    """SGLang's own load_plugins()."""
    from sglang.srt.plugins import load_plugins

    return load_plugins


@pytest.fixture
def pool(sglang_config):
    """Makes a filled real MLATokenToKVPool of two layers."""
    import stand_in
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    def make(dtype=torch.float8_e4m3fn, **options):
        made = MLATokenToKVPool(SLOTS, 1, dtype, 512, 64, 2, "cpu", False, **options)
        stand_in.fill_pool(made)
        return made

    return make
