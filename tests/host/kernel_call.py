"""Runs the shipped kernels on the CPU (kernel_runner.cpp) and says what they should give."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import numpy as np
from host_library import KERNEL, load_library

CKV_DIM = 512
GROUP_DIMS = 128
UNTOUCHED = 0xABCD  # what `out` holds before the call, as 16-bit words


# ---- the shipped tiles, as traits.cuh names them


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    tokens: int
    scaled: str  # the tile that computes its work items when there are group scales


def _read_tiles() -> dict[str, Tile]:
    text = (KERNEL / "traits.cuh").read_text()
    found = re.findall(r"using ((?:Wide)?Rows\w+) = Tile<(\d+), \d+, (\d+),", text)
    found += re.findall(r"using (Wgmma\w+) = WgmmaTile<(\d+), \d+, (\d+),", text)
    return {
        name: Tile(int(rows), int(tokens), f"ScaledRows{min(int(rows), 16)}")
        for name, rows, tokens in found
    }


TILES = _read_tiles()

# ---- formats


def fp8_values(e5m2: bool) -> np.ndarray:
    """float64 [256], the value of each code: e4m3fn (no infinity, 2 NaN) or e5m2."""
    code = np.arange(256)
    mantissa_bits, bias = (2, 15) if e5m2 else (3, 7)
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    value = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
        (mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - float(bias) - mantissa_bits),
    )
    if e5m2:
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value)


def to_fp8(x: np.ndarray, e5m2: bool) -> np.ndarray:
    """Codes of the nearest finite values."""
    values = fp8_values(e5m2)
    codes = np.flatnonzero(np.isfinite(values))
    codes = codes[np.argsort(values[codes], kind="stable")]
    ordered = values[codes]
    right = np.clip(np.searchsorted(ordered, x), 1, len(codes) - 1)
    nearer_left = x - ordered[right - 1] < ordered[right] - x
    return codes[right - nearer_left].astype(np.uint8)


def to_16_bits(x: np.ndarray, bf16: bool) -> np.ndarray:
    x = np.asarray(x, np.float32)
    if not bf16:
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_16_bits(words: np.ndarray, bf16: bool) -> np.ndarray:
    if not bf16:
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ---- a call


@dataclasses.dataclass
class Case:
    """One call of the module. Requests are (query tokens, kv tokens)."""

    requests: list[tuple[int, int]]
    heads: int
    tile: str  # of TILES
    kpe_dim: int = 64
    e5m2: bool = False
    bits: bool = False  # the conversion of GPUs without FP8 hardware
    group_scales: bool = False
    bf16: bool = True
    causal: bool = False
    page_size: int = 1
    ckv_scale: float = 1.0
    kpe_scale: float = 1.0
    sm_scale: float = 576**-0.5
    lse: bool = True
    lse_base_e: bool = False
    grid: int = 3
    merge_grid: int = 2
    q_magnitude: float = 1.0
    # One array for ckv and kpe as in SGLang's pool, with bytes between its rows; else two arrays.
    joint_cache: bool = True
    reverse_warps: bool = False
    count_conflicts: bool = False
    workers: int = 2
    seed: int = 0
    extra_tokens: int = 1  # rows of q and out beyond qo_indptr[-1]


@dataclasses.dataclass
class Inputs:
    """Arrays of a case: caches as bytes, q as 16-bit words. Cache bytes not referenced are 0xff."""

    ckv: np.ndarray  # [pages, page_size, 512]
    kpe: np.ndarray  # [pages, page_size, kpe_dim]
    group_scales: np.ndarray | None  # [pages, page_size, 4] float32
    kv_indices: np.ndarray
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_len: np.ndarray
    q_nope: np.ndarray  # [tokens, heads, 512]
    q_pe: np.ndarray  # [tokens, heads, kpe_dim]


def make_inputs(case: Case) -> Inputs:
    rng = np.random.default_rng(case.seed)
    page = case.page_size
    kv_len = np.array([kv for _, kv in case.requests], np.int32)
    pages_of = (kv_len + page - 1) // page
    qo_indptr = np.concatenate([[0], np.cumsum([q for q, _ in case.requests])]).astype(np.int32)
    kv_indptr = np.concatenate([[0], np.cumsum(pages_of)]).astype(np.int32)
    # Page 0 is never referenced, as in SGLang's pool, nor is every other page.
    used = int(kv_indptr[-1])
    num_pages = 2 * used + 2
    kv_indices = 1 + rng.permutation(num_pages - 1)[:used].astype(np.int32)

    row_bytes = CKV_DIM + case.kpe_dim
    if case.joint_cache:
        pool = np.full((num_pages, page, row_bytes + 32), 0xFF, np.uint8)
        ckv, kpe = pool[..., :CKV_DIM], pool[..., CKV_DIM:row_bytes]
    else:
        ckv = np.full((num_pages, page, CKV_DIM), 0xFF, np.uint8)
        kpe = np.full((num_pages, page, case.kpe_dim), 0xFF, np.uint8)
    scales = np.full((num_pages, page, 4), np.nan, np.float32) if case.group_scales else None
    for b, tokens in enumerate(kv_len):
        at = token_places(kv_indices[kv_indptr[b] :], tokens, page)
        ckv[at] = to_fp8(rng.standard_normal((tokens, CKV_DIM)) * 2, case.e5m2)
        kpe[at] = to_fp8(rng.standard_normal((tokens, case.kpe_dim)) * 2, case.e5m2)
        if scales is not None:
            scales[at] = np.exp2(rng.uniform(-3, 3, (tokens, 4)))

    q_tokens = int(qo_indptr[-1]) + case.extra_tokens
    q = rng.standard_normal((q_tokens, case.heads, row_bytes)) * case.q_magnitude
    q = to_16_bits(q, case.bf16)
    q_nope, q_pe = q[..., :CKV_DIM], q[..., CKV_DIM:]
    return Inputs(ckv, kpe, scales, kv_indices, qo_indptr, kv_indptr, kv_len, q_nope, q_pe)


def token_places(pages: np.ndarray, tokens: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    token = np.arange(tokens)
    return pages[token // page_size], token % page_size


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]

    @classmethod
    def of(cls, array: np.ndarray | None) -> _Buffer:
        """From the first to the last byte of the array: one byte further is out of bounds."""
        if array is None or array.size == 0:
            return cls(None, 0)
        span = (
            sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
            + array.itemsize
        )
        return cls(array.ctypes.data, span)


class _Call(ctypes.Structure):
    _fields_ = (
        [
            (name, _Buffer)
            for name in ("ckv", "kpe", "kv_indices", "group_scales", "q_nope", "q_pe", "out", "lse")
        ]
        + [(name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_len")]
        + [(name, ctypes.c_int32) for name in ("batch", "heads", "causal", "page_size")]
        + [
            (name, ctypes.c_int64)
            for name in (
                *("ckv_page_stride", "ckv_token_stride", "kpe_page_stride", "kpe_token_stride"),
                *("q_nope_token_stride", "q_nope_head_stride"),
                *("q_pe_token_stride", "q_pe_head_stride"),
                *("out_token_stride", "out_head_stride"),
            )
        ]
        + [(name, ctypes.c_float) for name in ("sm_scale", "ckv_scale", "kpe_scale")]
        + [
            (name, ctypes.c_int32)
            for name in (
                *("lse_base_e", "q_is_bf16", "grid", "merge_grid"),
                *("workers", "reverse_warps", "count_conflicts"),
            )
        ]
    )


@dataclasses.dataclass
class Outcome:
    out: np.ndarray  # [tokens, heads, 512] 16-bit words
    lse: np.ndarray | None  # [tokens, heads] float32
    faults: str
    conflicts: dict[str, tuple[int, int]]  # operation: accesses of a warp, extra passes


def defines_of(case: Case) -> dict[str, int | str]:
    return {
        "MLA_FP8KV_TILE": TILES[case.tile].scaled if case.group_scales else case.tile,
        "MLA_FP8KV_PLAN_ROWS": TILES[case.tile].rows,
        "MLA_FP8KV_PLAN_TOKENS": TILES[case.tile].tokens,
        "MLA_FP8KV_E5M2": int(case.e5m2),
        "MLA_FP8KV_KPE": case.kpe_dim,
        "MLA_FP8KV_HAS_CVT_E4M3": int(not case.bits),
    }


def _aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(count + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + count].view(dtype).reshape(shape)


def _align(array: np.ndarray | None) -> np.ndarray | None:
    """The same view of a copy of its memory that starts at a multiple of 16 bytes."""
    if array is None or array.size == 0 or array.ctypes.data % 16 == 0:
        return array
    base = array if array.base is None else array.base
    copy = _aligned(base.shape, base.dtype)
    copy[...] = base
    offset = array.ctypes.data - base.ctypes.data
    return np.lib.stride_tricks.as_strided(
        copy.reshape(-1).view(np.uint8)[offset:].view(array.dtype), array.shape, array.strides
    )


def run(case: Case, inputs: Inputs) -> Outcome:
    """Runs the kernels; `out` and `lse` start as UNTOUCHED and NaN."""
    library = load_library("kernel_runner.cpp", defines_of(case))
    i = dataclasses.replace(
        inputs,
        **{f: _align(getattr(inputs, f)) for f in ("ckv", "kpe", "group_scales", "q_nope", "q_pe")},
    )
    tokens = i.q_nope.shape[0]
    out = _aligned((tokens, case.heads, CKV_DIM), np.uint16)
    out[...] = UNTOUCHED
    lse = np.full((tokens, case.heads), np.nan, np.float32) if case.lse else None
    call = _Call(
        **{
            name: _Buffer.of(getattr(i, name))
            for name in ("ckv", "kpe", "kv_indices", "group_scales", "q_nope", "q_pe")
        },
        out=_Buffer.of(out),
        lse=_Buffer.of(lse),
        **{name: getattr(i, name).ctypes.data for name in ("qo_indptr", "kv_indptr", "kv_len")},
        batch=len(case.requests),
        **{
            f"{cache}_{unit}_stride": getattr(i, cache).strides[dim]
            for cache in ("ckv", "kpe")
            for dim, unit in enumerate(("page", "token"))
        },
        **{
            f"{name}_{unit}_stride": array.strides[dim] // 2
            for name, array in (("q_nope", i.q_nope), ("q_pe", i.q_pe), ("out", out))
            for dim, unit in enumerate(("token", "head"))
        },
        q_is_bf16=case.bf16,
        **{
            name: getattr(case, name)
            for name, _ in _Call._fields_
            if name in {f.name for f in dataclasses.fields(Case)}
            and name not in ("group_scales", "lse")
        },
    )
    text = ctypes.create_string_buffer(1 << 14)
    library.run_attention(ctypes.byref(call), text, len(text))
    faults, conflicts = text.value.decode().split("\f")
    counts = (line.rsplit(" ", 2) for line in conflicts.splitlines())
    return Outcome(out, lse, faults.strip(), {op: (int(n), int(extra)) for op, n, extra in counts})


# ---- what is right


@dataclasses.dataclass
class Expected:
    out: np.ndarray  # [tokens, heads, 512] float64; rows of no request: NaN
    lse: np.ndarray  # [tokens, heads]
    out_bound: np.ndarray  # largest allowed |error| of each element
    lse_bound: np.ndarray


def expect(case: Case, i: Inputs) -> Expected:
    """Attention in float64 on the exactly widened cache, and how far the kernel may stray from it.

    The bound follows the kernel's roundings: one 16-bit rounding of the output; two of FP16,
    relative to P |V| (P, and the partial output or, with group scales, P times the scale); logits
    in FP32.
    """
    values = fp8_values(case.e5m2)
    tokens, heads = i.q_nope.shape[:2]
    out = np.full((tokens, heads, CKV_DIM), np.nan)
    lse = np.full((tokens, heads), np.nan)
    out_bound, lse_bound = np.zeros_like(out), np.zeros_like(lse)
    q_nope, q_pe = from_16_bits(i.q_nope, case.bf16), from_16_bits(i.q_pe, case.bf16)
    # Relative to the value.
    half_ulp = 2.0**-8 if case.bf16 else 2.0**-11
    for b, (qo_len, kv_len) in enumerate(case.requests):
        at = token_places(i.kv_indices[i.kv_indptr[b] :], kv_len, case.page_size)
        ckv = values[i.ckv[at]] * case.ckv_scale
        if i.group_scales is not None:
            ckv = ckv * np.repeat(i.group_scales[at].astype(np.float64), GROUP_DIMS, axis=1)
        kpe = values[i.kpe[at]] * case.kpe_scale
        for query in range(qo_len):
            token = i.qo_indptr[b] + query
            seen = kv_len - qo_len + query + 1 if case.causal else kv_len
            if seen <= 0:
                out[token], lse[token] = 0, -np.inf
                continue
            v = ckv[:seen]
            logits = case.sm_scale * (q_nope[token] @ v.T + q_pe[token] @ kpe[:seen].T)
            top = logits.max(axis=1, keepdims=True)
            p = np.exp(logits - top)
            total = p.sum(axis=1, keepdims=True)
            p /= total
            out[token] = p @ v
            lse[token] = (top + np.log(total))[:, 0] / (1 if case.lse_base_e else np.log(2))

            terms = np.abs(q_nope[token]) @ np.abs(v).T + np.abs(q_pe[token]) @ np.abs(kpe[:seen]).T
            rounded = 2 * np.abs(logits) + case.sm_scale * terms  # on the way to the logits
            logit_error = 2.0**-21 * rounded.max(axis=1)
            magnitude = p @ np.abs(v)
            out_bound[token] = (
                half_ulp * np.abs(out[token])
                + (2.0**-10 + 2 * logit_error[:, None]) * magnitude
                + seen * 2.0**-25 * np.abs(v).max()
                + 2.0**-24  # subnormal partials and outputs
            )
            lse_bound[token] = 2 * (logit_error + 2.0**-20)
    return Expected(out, lse, out_bound, lse_bound)


def mismatch(case: Case, inputs: Inputs, outcome: Outcome, expected: Expected) -> str:
    """Empty if the outcome is right, else what is wrong."""
    if outcome.faults:
        return outcome.faults
    end = int(inputs.qo_indptr[-1])
    if (outcome.out[end:] != UNTOUCHED).any():
        return "rows beyond qo_indptr[-1] were written"
    out = from_16_bits(outcome.out[:end], case.bf16)
    problems = [_compare("out", out, expected.out[:end], expected.out_bound[:end])]
    if outcome.lse is not None:
        if not np.isnan(outcome.lse[end:]).all():
            return "lse beyond qo_indptr[-1] was written"
        problems.append(
            _compare(
                "lse",
                outcome.lse[:end].astype(np.float64),
                expected.lse[:end],
                expected.lse_bound[:end],
            )
        )
    return "; ".join(p for p in problems if p)


def _compare(name: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> str:
    with np.errstate(invalid="ignore"):
        right = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= bound)
    if right.all():
        return ""
    at = tuple(int(x) for x in np.argwhere(~right)[0])
    return (
        f"{name}: {(~right).sum()} of {right.size} elements are wrong, first {name}{list(at)} = "
        f"{got[at]} instead of {want[at]} +- {bound[at]:.2g}"
    )


def check(case: Case) -> None:
    """Asserts that the kernels give the right answer and make no fault on the way."""
    inputs = make_inputs(case)
    assert mismatch(case, inputs, run(case, inputs), expect(case, inputs)) == "", case
