"""Parity with float64 attention and with the cast path, through the public wrapper."""

import functools
import math

import pytest
import torch
import variants
from mla_cases import (
    CKV,
    DEVICE,
    FP8,
    Case,
    Inputs,
    check,
    compare,
    error_norm,
    indptr,
    make_inputs,
    reference,
    run,
    run_cast,
)

pytestmark = pytest.mark.gpu

HEADS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 20, 24, 32, 33, 40, 48, 64, 65, 96, 100, 127, 128)
# Tile edges of 16, 32 and 64 tokens, the edges of a split, and long ones.
KV_EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255)
KV_EDGES += (256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 20000)

_long_and_short = Case(q_lens=(1,) * 7, kv_lens=(700, 1, 33, 2048, 64, 5, 129))
CASES = {f"heads {n}": Case(_long_and_short.q_lens, _long_and_short.kv_lens, n) for n in HEADS}
for q_len in (*range(1, 9), 17, 256):
    for causal in (False, True):
        for heads in (8, 16, 128) if q_len <= 17 else (8, 20):
            CASES[f"{q_len} queries, {heads} heads, {'causal' if causal else 'full'}"] = Case(
                (q_len,) * 3, (300, 513, 1200), heads, causal=causal
            )
for page_size in (1, 16, 32, 64, 128):
    CASES[f"page size {page_size}"] = Case((1,) * 5, (1, 63, 130, 1000, 4096), page_size=page_size)
CASES |= {
    "every kv edge": Case((1,) * len(KV_EDGES), KV_EDGES),
    "every kv edge, 4 queries": Case((4,) * len(KV_EDGES), KV_EDGES, 16, causal=True),
    "one long request": Case((1,), (131072,), 8),
    "skewed": Case((1,) * 33, (50000, *[17] * 32), 16),
    "big batch": Case((1,) * 300, tuple(range(0, 900, 3)), 8),
    "separate caches": Case((1, 2), (100, 900), layout="separate"),
    "interleaved layers": Case((1, 2), (100, 900), layout="layers", page_size=16),
    "e5m2": Case((1, 2), (100, 900), kv="e5m2"),
    "natural lse": Case((1, 2), (100, 900), lse="basee"),
    "no lse": Case((1, 2), (100, 900), lse=None),
    "sharp softmax": Case((1, 2), (100, 900), sm_scale=1.0),
}
BEYOND_THE_CAST_PATH = {
    "no logits": Case((1, 2), (100, 900), sm_scale=0.0),  # FA2 gives NaN
    "fp16 query": Case((1, 3, 1), (700, 90, 0), q="fp16"),
    "fp16 query, e5m2": Case((1, 3, 1), (700, 90, 0), q="fp16", kv="e5m2"),
    "fp16 query, 128 heads": Case((1, 3), (700, 90), 128, q="fp16", causal=True),
    "no rope part": Case((1, 3, 1), (700, 90, 0), kpe=0),
    "no rope part, e5m2, fp16": Case((1, 3, 1), (700, 90, 0), 16, kpe=0, kv="e5m2", q="fp16"),
    "no rope part, many rows": Case((16, 3), (700, 90), 64, kpe=0, causal=True),
}


@functools.cache
def has_fa3() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("name", CASES)
def test_float64_and_cast_path(name):
    case = CASES[name]
    inputs = make_inputs(case)
    want, want_lse = reference(inputs)
    got, lse = run(inputs)
    problems = compare(case, got, lse, want, want_lse)
    assert not problems, f"{'; '.join(problems)}\nrepeat with: {case.line()}"
    live = ~want_lse.isneginf()
    ours = error_norm(got[live], want[live])
    for backend in ("fa2", "fa3") if has_fa3() else ("fa2",):
        try:
            cast = run_cast(inputs, backend)
        except ValueError as refusal:
            # Upstream's planner cannot serve these shapes correctly and says so.
            assert "causal tile boundary" in str(refusal)
            continue
        theirs = error_norm(cast[live], want[live])
        # Both are 0 where one token decides a row; a millionth of the answer stands for that.
        assert ours <= 1.1 * theirs + 1e-6 * float(want.norm()), f"{ours} > 1.1 * {theirs}"


@pytest.mark.parametrize("name", BEYOND_THE_CAST_PATH)
def test_float64(name):
    check(BEYOND_THE_CAST_PATH[name])


def test_explicit_fa2_is_the_same_kernel():
    inputs = make_inputs(CASES["skewed"])
    for auto, explicit in zip(run(inputs, "auto"), run(inputs, "fa2"), strict=True):
        assert torch.equal(auto, explicit)


def finite_codes(kv: str) -> torch.Tensor:
    """Every byte of a format that stands for a finite number."""
    codes = torch.arange(256, device=DEVICE, dtype=torch.uint8)
    return codes[codes.view(FP8[kv]).float().isfinite()]


def one_token_requests(kv, q, heads, q_len, query, width=576):
    """Requests of one token each; row r holds the codes in order, beginning with the r-th."""
    codes = finite_codes(kv)
    count = len(codes)
    step = torch.arange(width, device=DEVICE)[None] + torch.arange(count, device=DEVICE)[:, None]
    pool = codes[step % count][:, None].view(FP8[kv])
    case = Case((q_len,) * count, (1,) * count, heads, kv=kv, q=q, sm_scale=1.0, lse="basee")
    inputs = Inputs(
        case,
        query[..., :CKV],
        query[..., CKV:],
        pool[..., :CKV],
        pool[..., CKV:],
        indptr(case.q_lens, DEVICE),
        indptr(case.kv_lens, DEVICE),
        torch.arange(count, device=DEVICE, dtype=torch.int32),
        torch.ones(count, dtype=torch.int32, device=DEVICE),
        None,
    )
    return inputs, pool[:, 0].float()


CONVERSIONS = [("e4m3", ""), ("e4m3", "bits"), ("e5m2", "")]


@pytest.mark.parametrize("tile", [None, *variants.TILES], ids=str)
@pytest.mark.parametrize("kv, dequant", CONVERSIONS)
@pytest.mark.parametrize("q", ["bf16", "fp16"])
def test_every_code_as_value(kv, dequant, q, tile, monkeypatch):
    """A softmax over one token: the output is the cached row, each code in each position."""
    variants.use(tile, monkeypatch)
    monkeypatch.setenv("MLA_FP8KV_DEQUANT", dequant)
    dtype = torch.bfloat16 if q == "bf16" else torch.float16
    count = len(finite_codes(kv))
    query = torch.zeros(count, 8, 576, dtype=dtype, device=DEVICE)
    inputs, values = one_token_requests(kv, q, 8, 1, query)
    out, _ = run(inputs)
    assert torch.equal(out.float(), values[:, None, :CKV].expand(-1, 8, -1))


@pytest.mark.parametrize("tile", [None, *variants.TILES], ids=str)
@pytest.mark.parametrize("kv, dequant", CONVERSIONS)
@pytest.mark.parametrize("q", ["bf16", "fp16"])
def test_every_code_as_key(kv, dequant, q, tile, monkeypatch):
    """One-hot queries: the log-sum-exp of one token is its code, at each of the 576 positions."""
    variants.use(tile, monkeypatch)
    monkeypatch.setenv("MLA_FP8KV_DEQUANT", dequant)
    dtype = torch.bfloat16 if q == "bf16" else torch.float16
    heads, q_len = 8, 72
    count = len(finite_codes(kv))
    one_hot = torch.eye(576, dtype=dtype, device=DEVICE).view(1, q_len, heads, 576)
    query = one_hot.expand(count, -1, -1, -1).reshape(count * q_len, heads, 576)
    inputs, values = one_token_requests(kv, q, heads, q_len, query)
    _, lse = run(inputs)
    got = lse.view(count, 576)
    # The kernel's logarithm is base 2: two roundings of FP32 on the way there and back. The two
    # nearest codes of a format differ by 6 percent, or by its smallest subnormal.
    assert torch.allclose(got, values, rtol=1e-6, atol=0), float((got - values).abs().max())


def test_large_logits():
    """Scores of +-1e4: the largest decides, and no exponential overflows."""
    case = Case((1, 1), (300, 2000), 16, sm_scale=0.07)
    inputs = make_inputs(case)
    inputs.q_nope.mul_(256)
    inputs.q_pe.mul_(256)
    want, want_lse = reference(inputs)
    assert want_lse.abs().max() > 1e3 and math.isfinite(float(want_lse.max()))
    got, _ = run(inputs)
    # Scores near 1e3 have an FP32 spacing of 2^-14, which the exponential turns into 1e-4.
    problems = compare(case, got, None, want, want_lse)
    assert not problems, problems


@pytest.mark.parametrize("exponent", [-60, -20, 15, 60, 110])
def test_query_rows_of_any_magnitude(exponent):
    """BF16 reaches far beyond FP16; each row has a scale of its own."""
    case = Case((1, 2), (300, 900), 8, sm_scale=0.07 * 2.0**-exponent)
    inputs = make_inputs(case)
    inputs.q_nope.mul_(2.0**exponent)
    inputs.q_pe.mul_(2.0**exponent)
    problems = compare(case, *run(inputs), *reference(inputs))
    assert not problems, problems


def test_rows_of_different_magnitude_in_one_tile():
    case = Case((4,), (300,), 8)
    inputs = make_inputs(case)
    factor = 2.0 ** torch.arange(-12, 4, 0.5, device=DEVICE).view(4, 8, 1)
    inputs.q_nope.mul_(factor)
    inputs.q_pe.mul_(factor)
    problems = compare(case, *run(inputs), *reference(inputs))
    assert not problems, problems
