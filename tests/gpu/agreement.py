"""Calls whose results on the host (tests/host) are in data/host_agreement.npz.

Shared by test_host_agreement.py, which repeats them on a GPU, and tests/host, which makes and
checks the file. numpy only.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent / "data" / "host_agreement.npz"
POOL_TOKENS, QUERY_ROWS = 100, 24


@dataclass(frozen=True)
class AgreementCase:
    """rows, wgmma: of the tile. bits: widened by bit placement. The requests' pages are scattered
    over one pool."""

    name: str
    rows: int
    q_lens: tuple
    kv_lens: tuple
    heads: int = 8
    kv: str = "e4m3"
    bits: bool = False
    q: str = "bf16"
    kpe: int = 64
    causal: bool = False
    page_size: int = 1
    group_scales: bool = False
    ckv_scale: float = 1.0
    kpe_scale: float = 1.0
    lse_base_e: bool = False
    sm_scale: float = 0.05
    wgmma: bool = False


CASES = (
    AgreementCase("8 rows", 8, (1,), (100,)),
    AgreementCase("8 rows placed", 8, (1,), (100,), bits=True),
    AgreementCase("8 rows e5m2 fp16", 8, (1,), (65,), kv="e5m2", q="fp16", sm_scale=0.01),
    AgreementCase("8 rows scales", 8, (1,), (90,), group_scales=True),
    AgreementCase("8 rows no kpe", 8, (1,), (63,), kpe=0, lse_base_e=True),
    AgreementCase("16 rows causal pages", 16, (2,), (70,), causal=True, page_size=5),
    AgreementCase("16 rows placed fp16", 16, (1,), (33,), heads=12, bits=True, q="fp16"),
    AgreementCase("16 rows cache scales", 16, (1,), (100,), ckv_scale=0.0625, kpe_scale=4.0),
    AgreementCase("32 rows causal", 32, (3,), (100,), causal=True),
    AgreementCase("32 rows scales", 32, (2,), (40,), group_scales=True),
    AgreementCase("64 rows mixed", 64, (1, 1), (64, 36), heads=12),
    AgreementCase("64 rows placed", 64, (1,), (1,), bits=True),
    AgreementCase("64 rows e5m2 scales", 64, (1,), (77,), kv="e5m2", group_scales=True),
    AgreementCase("32 rows wgmma causal", 32, (3,), (100,), causal=True, wgmma=True),
    AgreementCase("64 rows wgmma mixed", 64, (1, 1), (64, 36), heads=12, wgmma=True),
    AgreementCase("64 rows wgmma e5m2", 64, (1,), (100,), kv="e5m2", wgmma=True),
)


@dataclass
class Arrays:
    ckv: np.ndarray  # [pages, page_size, 512] bytes
    kpe: np.ndarray  # [pages, page_size, kpe] bytes
    group_scales: np.ndarray | None  # [pages, page_size, 4] float32
    q_nope: np.ndarray  # [tokens, heads, 512] 16-bit words
    q_pe: np.ndarray  # [tokens, heads, kpe] 16-bit words
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_len: np.ndarray


def arrays_of(case: AgreementCase, data) -> Arrays:
    """The inputs of a case from the file's `pool` [tokens, 576] bytes, `group_scales` [tokens, 4]
    and `q` [rows, 576] float32."""
    tokens = sum(case.q_lens)
    q = data["q"][: tokens * case.heads].reshape(tokens, case.heads, 576)
    if case.q == "fp16":
        words = q.astype(np.float16).view(np.uint16)
    else:
        words = (q.view(np.uint32) >> 16).astype(np.uint16)  # q holds BF16 values
    pool = data["pool"].reshape(-1, case.page_size, 576)
    scales = data["group_scales"].reshape(-1, case.page_size, 4) if case.group_scales else None
    pages = [-(-length // case.page_size) for length in case.kv_lens]
    order = np.arange(sum(pages)) * 7 % len(pool)  # 7 divides no number of pages used here
    return Arrays(
        np.ascontiguousarray(pool[..., :512]),
        np.ascontiguousarray(pool[..., 512 : 512 + case.kpe]),
        scales,
        np.ascontiguousarray(words[..., :512]),
        np.ascontiguousarray(words[..., 512 : 512 + case.kpe]),
        np.cumsum([0, *case.q_lens]).astype(np.int32),
        np.cumsum([0, *pages]).astype(np.int32),
        order.astype(np.int32),
        np.array(case.kv_lens, np.int32),
    )


def _values(words: np.ndarray, q: str) -> np.ndarray:
    if q == "fp16":
        return words.view(np.float16).astype(np.float64)
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def disagreement(case: AgreementCase, out, lse, other_out, other_lse) -> str:
    """Empty if two executions of a case agree, else how they differ. `out`s are 16-bit words.

    They may differ in the order of FP32 sums and in the last bits of exp2 and log2. That moves an
    element to the neighbouring 16-bit number; where sums cancel, to one of the numbers as near as
    neighbours are at a quarter of its row's largest element. Most elements do not move at all.
    """
    digits = 10 if case.q == "fp16" else 7
    a, b = _values(out, case.q), _values(other_out, case.q)
    size = np.maximum(np.abs(a), np.abs(b))
    size = np.maximum(size, size.max(axis=-1, keepdims=True) / 4)
    unit = np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-100))) - digits)
    far = np.abs(a - b) > unit
    moved = (out != other_out).mean()
    problems = []
    if far.any():
        worst = np.unravel_index(np.argmax(np.abs(a - b) / unit), a.shape)
        problems.append(
            f"{far.sum()} of {a.size} elements are further apart than one rounding, at most "
            f"{a[worst]} and {b[worst]} at {[int(i) for i in worst]}"
        )
    if moved > 0.02:
        problems.append(f"{moved:.0%} of the elements differ")
    if not np.allclose(lse, other_lse, rtol=2.0**-20, atol=2.0**-18):
        problems.append(f"the LSEs differ by up to {np.abs(lse - other_lse).max()}")
    return "; ".join(problems)
