"""What a step costs on the host: planning a batch, and one call of run()."""

from __future__ import annotations

import random

import torch

from .case import Case, Pools, caches
from .contenders import Unavailable
from .rows import HEAD_DIM_CKV, Row
from .timing import host_us
from .wrapper import plan, tensors

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEADS = 16
_REPEAT = 50


def _plan_us(wrapper, kv_lens: list[int]) -> float:
    """Time of `module.plan` as SGLang's graph replay calls it, staging to the GPU included."""
    pages = torch.tensor([0, *kv_lens]).cumsum(0).int()
    requests = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
    arguments = (
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        requests,
        pages,
        torch.tensor(kv_lens, dtype=torch.int32),
        HEADS,
        HEAD_DIM_CKV,
        False,
    )
    module = wrapper._cached_module
    return host_us(lambda: module.plan(*arguments), _REPEAT, torch.cuda.synchronize)


def measure(pools: Pools) -> dict:
    """Plan time over batch sizes and the time of an asynchronous run() call, ours and upstream's.

    Returns `{"plan_us": [{"batch", "heads", "ours", "upstream"}], "run_us": {"ours", "upstream"}}`,
    upstream being FA2 on a BF16 cache.
    """
    case = Case(Row(HEADS, (500,)), pools)
    wrappers = {
        "ours": plan(case, "fa2", pools.dtype, case.table),
        "upstream": plan(case, "fa2", torch.bfloat16, case.table),
    }
    if wrappers["ours"]._cached_module is wrappers["upstream"]._cached_module:
        raise Unavailable("flashinfer here is not the patched build")

    query = case.q[..., :HEAD_DIM_CKV], case.q[..., HEAD_DIM_CKV:]

    def run_us(name: str, pool: torch.Tensor) -> float:
        run, arguments = wrappers[name].run, tensors(query, caches(pool, 1))
        return host_us(
            lambda: run(**arguments, out=case.out),
            10 * _REPEAT,
            torch.cuda.synchronize,
        )

    # Before the plans: those are for other requests than the tensors here.
    runs = {"ours": run_us("ours", pools.fp8[0]), "upstream": run_us("upstream", pools.bf16[0])}
    draw = random.Random(0)
    plans = []
    for batch in BATCHES:
        kv_lens = [draw.randint(1024, 4096) for _ in range(batch)]
        times = {name: _plan_us(wrapper, kv_lens) for name, wrapper in wrappers.items()}
        plans.append({"batch": batch, "heads": HEADS, **times})
    return {"plan_us": plans, "run_us": runs}
