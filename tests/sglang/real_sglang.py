"""The real backend on a GPU: finds SGLang, loads the plug-in, makes backends on a real pool."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import slim_sglang
import stand_in

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "0.5.23"
_NO_SGLANG = (
    f"sglang {VERSION} is not importable: install it, or set MLA_FP8KV_SGLANG_TREE to what "
    "bench/pack_sglang.py packed"
)


def why_not() -> str | None:
    """Why the real backend cannot be imported here, or None once it can."""
    if importlib.util.find_spec("sglang") is None:
        tree = Path(os.environ.get("MLA_FP8KV_SGLANG_TREE") or REPOSITORY / "build/sglang-slim")
        if not (tree / "sglang").is_dir():
            return _NO_SGLANG
        slim_sglang.activate(tree)
    version = importlib.metadata.version("sglang")
    return None if version == VERSION else f"{_NO_SGLANG}; found {version}"


def load_plugin(folder: Path) -> None:
    """SGLang's own load_plugins(), with our entry point even where the wheel is not installed."""
    from sglang.srt import plugins

    points = importlib.metadata.entry_points(group=plugins.GENERAL_PLUGINS_GROUP)
    if "mla_fp8kv" not in [point.name for point in points]:
        info = folder / "mla_fp8kv_entry_point-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: mla-fp8kv-entry-point\nVersion: 0\n"
        )
        (info / "entry_points.txt").write_text(
            f"[{plugins.GENERAL_PLUGINS_GROUP}]\nmla_fp8kv = mla_fp8kv.sglang:activate\n"
        )
        sys.path.append(str(folder))
    os.environ["SGLANG_PLUGINS"] = "mla_fp8kv"
    plugins.load_plugins()


def make_pool(dtype, slots, layers, device="cuda"):
    """A real MLATokenToKVPool filled with random values."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = MLATokenToKVPool(slots, 1, dtype, 512, 64, layers, device, False)
    stand_in.fill_pool(pool)
    return pool


def make_backends(pool, **options):
    """(SGLang's backend with its cast, the same with the plug-in's methods), on one pool."""
    module = importlib.import_module("sglang.srt.layers.attention.flashinfer_mla_backend")
    runner = stand_in.model_runner(pool, **options)
    ours, cast = (module.FlashInferMLAAttnBackend(runner, False) for _ in range(2))
    replaced = {
        (item, name)
        for item in (ours, ours.indices_updater_decode, ours.indices_updater_prefill)
        for name in ("forward_decode", "forward_extend", "call_begin_forward")
        if name in vars(item)
    }
    assert len(replaced) == 4, "the plug-in is not active; its log line says why"
    for item in (cast, cast.indices_updater_decode, cast.indices_updater_prefill):
        for name in ("forward_decode", "forward_extend", "call_begin_forward"):
            vars(item).pop(name, None)  # what is below is SGLang's own function
    return cast, ours
