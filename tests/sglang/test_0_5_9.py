"""SGLang 0.5.9's real backend file, as released and patched, in a process of its own."""

import os

import pytest
import releases
from flashinfer_base import flat_wrapper_only
from mla_fp8kv import sglang_patch
from released_backend import run

pytest.importorskip("torch")

FP8 = {"e4m3": "torch.float8_e4m3fn", "e5m2": "torch.float8_e5m2"}


@pytest.fixture(scope="module")
def texts():
    """(as released, patched)"""
    released = releases.backend_file("0.5.9").decode()
    patch = sglang_patch.Patch(sglang_patch.available()["0.5.9"])
    return released, patch.apply(released)


def test_patched_casts_no_pool(texts, tmp_path):
    before, after = (run(tmp_path / str(n), text) for n, text in enumerate(texts))
    for name, dtype in FP8.items():
        assert before[name]["casts"] > 0 and before[name]["run"] == ["torch.bfloat16"]
        assert after[name]["casts"] == 0 and after[name]["run"] == [dtype]
        assert after[name]["planned"] == [f"torch.bfloat16 {dtype}"]
        assert after[name]["outputs"] == before[name]["outputs"]
    assert after["bf16"] == before["bf16"]
    assert after["packed rows"] == "torch.bfloat16"


@flat_wrapper_only
@pytest.mark.skipif("MLA_FP8KV_WHEEL" not in os.environ, reason="./build.sh test builds the wheel")
def test_patched_on_our_wheels_wrapper(texts, tmp_path):
    """Decode, extend and graph replay go through FlashInfer 0.6's own wrapper to the FP8 module."""
    released, patched = texts
    expected = run(tmp_path / "stand-in", released)
    cast = run(tmp_path / "released", released, "flashinfer")
    ours = run(tmp_path / "patched", patched, "flashinfer")
    for name, dtype in FP8.items():
        assert cast[name]["modules"] == ["torch.bfloat16"] and cast[name]["casts"] > 0
        assert ours[name]["modules"] == [dtype] and ours[name]["casts"] == 0
        assert ours[name]["run"] == [dtype]
        assert ours[name]["outputs"] == expected[name]["outputs"] == cast[name]["outputs"]
    assert ours["bf16"] == cast["bf16"]
