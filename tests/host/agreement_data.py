"""Makes tests/gpu/data/host_agreement.npz: `python tests/host/agreement_data.py`.

To be made again when the kernel computes in another order; test_agreement_data.py says when.
"""

from __future__ import annotations

import sys

import numpy as np
from host_library import HERE
from kernel_call import Case, Inputs, run, to_16_bits, to_fp8

sys.path.insert(0, str(HERE.parent / "gpu"))
from agreement import (  # noqa: E402
    CASES,
    DATA,
    POOL_TOKENS,
    QUERY_ROWS,
    AgreementCase,
    arrays_of,
)


def make_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    q = to_16_bits(rng.standard_normal((QUERY_ROWS, 576)), bf16=True)
    return {
        "pool": to_fp8(rng.standard_normal((POOL_TOKENS, 576)) * 2, e5m2=False),
        "group_scales": np.exp2(rng.uniform(-3, 3, (POOL_TOKENS, 4))).astype(np.float32),
        "q": (q.astype(np.uint32) << 16).view(np.float32),
    }


def run_on_host(case: AgreementCase, data) -> tuple[np.ndarray, np.ndarray]:
    """(out as 16-bit words, lse). Raises RuntimeError if the kernel makes a fault."""
    arrays = arrays_of(case, data)
    call = Case(
        list(zip(case.q_lens, case.kv_lens, strict=True)),
        case.heads,
        f"{'Wgmma' if case.wgmma else ''}Rows{case.rows}",
        kpe_dim=case.kpe,
        e5m2=case.kv == "e5m2",
        bits=case.bits,
        group_scales=case.group_scales,
        bf16=case.q == "bf16",
        causal=case.causal,
        page_size=case.page_size,
        ckv_scale=case.ckv_scale,
        kpe_scale=case.kpe_scale,
        sm_scale=case.sm_scale,
        lse_base_e=case.lse_base_e,
        grid=64,  # as on a GPU, more CTAs than tiles: the KV is cut in the same places
    )
    outcome = run(call, Inputs(**vars(arrays)))
    if outcome.faults:
        raise RuntimeError(outcome.faults)
    return outcome.out, outcome.lse


def main() -> None:
    data = make_arrays()
    for case in CASES:
        data[f"{case.name}/out"], data[f"{case.name}/lse"] = run_on_host(case, data)
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, **data)
    print(f"{DATA}: {DATA.stat().st_size} bytes")


if __name__ == "__main__":
    main()
