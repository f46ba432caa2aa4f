"""SGLang 0.5.9's real backend file on the GPU, as released and patched.

MLA_FP8KV_SGLANG_0_5_9 names the file, flashinfer_mla_backend.py as released.
Stood in for: everything else of SGLang (tests/sglang/run_0_5_9.py).
"""

import os
import sys
from pathlib import Path

import pytest
from flashinfer_base import flat_wrapper_only

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

from released_backend import run  # noqa: E402

FILE = os.environ.get("MLA_FP8KV_SGLANG_0_5_9")
pytestmark = [
    pytest.mark.gpu,
    flat_wrapper_only,
    pytest.mark.skipif(not FILE, reason="MLA_FP8KV_SGLANG_0_5_9 does not name SGLang's file"),
]


def test_patched_gives_what_the_cast_gives(tmp_path):
    """Decode, extend and decode replayed from a graph, without a cast of the pool."""
    from mla_fp8kv import sglang_patch

    released = Path(FILE).read_text()
    patched = sglang_patch.Patch(sglang_patch.available()["0.5.9"]).apply(released)
    cast = run(tmp_path / "released", released, "flashinfer", "cuda")
    ours = run(tmp_path / "patched", patched, "flashinfer", "cuda")
    for name in ("e4m3", "e5m2"):
        assert cast[name]["casts"] > 0 and ours[name]["casts"] == 0
        for got, want in zip(ours[name]["outputs"], cast[name]["outputs"], strict=True):
            got, want = torch.tensor(got), torch.tensor(want)
            # Each is rounded to BF16, and the cast path holds P in BF16 besides.
            assert (got - want).norm() < 2.0**-7 * want.norm()
    assert ours["bf16"] == cast["bf16"]
