"""Every step on a packed SGLang, on the CPU: python run_slim.py TREE, prints the steps that ran.

A process of its own, because another SGLang may be installed.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import real_sglang
import slim_sglang
import stand_in
import torch


def main(tree: str) -> None:
    slim_sglang.activate(Path(tree))
    # No GPU: neither FlashInfer's wrappers nor Triton.
    slim_sglang.ANSWERS["sglang.srt.utils"]["is_flashinfer_available"] = lambda: False
    platform = slim_sglang.ANSWERS["sglang.srt.platforms"]["current_platform"]
    platform.capabilities.supports_triton = False
    module = importlib.import_module("sglang.srt.layers.attention.flashinfer_mla_backend")
    assert module.__file__.startswith(tree), module.__file__
    module.BatchMLAPagedAttentionWrapper = stand_in.CpuMlaWrapper
    module.BatchPrefillWithRaggedKVCacheWrapper = stand_in.RaggedWrapper
    import steps

    with stand_in.OnCpu(), tempfile.TemporaryDirectory() as folder:
        real_sglang.load_plugin(Path(folder))
        pool = real_sglang.make_pool(torch.float8_e4m3fn, 2048, 1, device="cpu")
        cast, ours = real_sglang.make_backends(pool, device="cpu")
        for name, step in steps.ALL.items():
            options = {} if name.startswith("graph") else {"write": True}
            assert torch.equal(step(cast, **options), step(ours, **options)), name
            print(name)


if __name__ == "__main__":
    os.environ.pop("MLA_FP8KV_SGLANG", None)
    main(sys.argv[1])
