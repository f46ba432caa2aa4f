"""Sampled problems, and a command that checks a plan.h on them.

    python plan_samples.py BUILD_DIR KERNEL_DIR COUNT [compiler flags]

exits 0 if every sampled plan is right; otherwise the last line names the rule that was broken. A
separate process, so that a plan.h that crashes or never ends can be checked too.
"""

from __future__ import annotations

import sys

import numpy as np
from plan_checker import MAX_KV_LEN, Planner, Problem, check_coverage_by_hand, check_plan


def sample_problem(rng: np.random.Generator, small: bool = False) -> Problem:
    """A problem from the distributions that serving and its accidents produce."""
    batch = int(rng.integers(0, 5 if small else rng.choice([4, 40, 301])))
    longest = 300 if small else int(rng.choice([64, 500, 4096, 20000]))
    kind = rng.integers(0, 5 if small else 6)
    if kind == 0:
        kv = rng.integers(0, longest + 1, batch)
    elif kind == 1:
        kv = np.full(batch, longest)
    elif kind == 2:  # one long, many short
        kv = rng.integers(1, 65, batch)
        if batch:
            kv[rng.integers(0, batch)] = longest
    elif kind == 3:  # mostly idle
        kv = rng.integers(0, longest + 1, batch) * (rng.random(batch) < 0.2)
    elif kind == 4:  # on tile edges
        kv = np.maximum(
            0, rng.integers(0, longest // 64 + 2, batch) * 64 + rng.integers(-1, 2, batch)
        )
    else:  # as long as kv_indptr can hold
        kv = rng.integers(0, min(MAX_KV_LEN, 2 * MAX_KV_LEN // max(1, batch)) + 1, batch)
    longest_q = int(rng.choice([1, 4, 9] if small else [1, 1, 4, 8, 300 if batch < 40 else 4]))
    qo = rng.integers(0, longest_q + 1, batch) if rng.random() < 0.5 else np.full(batch, longest_q)
    return Problem(
        qo.tolist(),
        kv.tolist(),
        num_heads=int(rng.choice([1, 3, 8, 12, 16, 20, 32, 64, 128, 130])),
        causal=bool(rng.random() < 0.5),
        page_size=int(rng.choice([1, 3, 16, 64])),
        q_start=int(rng.choice([0, 0, 5])),
    )


def sample_tile(planner: Planner, rng: np.random.Generator, small: bool = False):
    """(tile, grid) of a device small or large."""
    rows, tokens, ctas = [(8, 64, 2), (16, 64, 2), (32, 32, 2), (64, 64, 1)][rng.integers(0, 4)]
    grid = int(rng.choice([1, 2, 7, 23] if small else [1, 46, 132, 264, 376])) * ctas
    return planner.tile(rows, 16 if small else tokens, ctas), grid


def check_sample(planner: Planner, seed: int) -> None:
    """Every second problem is small enough to count all its tokens by hand."""
    rng = np.random.default_rng(seed)
    small = seed % 2 == 0
    problem = sample_problem(rng, small)
    tile, grid = sample_tile(planner, rng, small)
    try:
        plan = planner.plan(problem, tile, grid)
        check_plan(problem, tile, plan)
        if small:
            check_coverage_by_hand(problem, tile, plan)
        check_capacity(planner, problem, tile, grid, plan)
    except AssertionError as error:
        raise AssertionError(f"{error}; seed {seed}: {problem}, {tile}, grid {grid}") from error


def check_capacity(planner, problem, tile, grid, plan) -> None:
    """What a plan used is exactly what it needs, and it gives the same bytes again."""
    needed = plan.result.staged_bytes
    exact = planner.plan(problem, tile, grid, capacity=needed)
    assert exact.status == "ok", "refused although it fits"
    assert exact.staged.tobytes() == plan.staged[:needed].tobytes(), "not deterministic"
    refused = planner.plan(problem, tile, grid, capacity=needed - 1)
    assert refused.status == "int_capacity", refused.status
    assert (refused.result.limit, refused.result.given) == (needed, needed - 1)
    refused = planner.plan(problem, tile, grid, slots=2 * grid - 1)
    assert refused.status == "float_capacity", refused.status
    assert (refused.result.limit, refused.result.given) == (2 * grid, 2 * grid - 1)


if __name__ == "__main__":
    build_dir, kernel_dir, count, *flags = sys.argv[1:]
    shim = Planner(build_dir, kernel_dir, flags)
    for sample in range(int(count)):
        check_sample(shim, sample)
