"""Every plan obeys params.h's rules, whatever the lengths are."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plan_checker import (
    CTA_WORK,
    CTA_WORK_OFFSET,
    HEADER,
    KERNEL_DIR,
    MAX_KV_LEN,
    MERGE_ITEM,
    NOT_CAUSAL,
    WORK_ITEM,
    Problem,
    check_plan,
)
from plan_samples import check_sample


def test_layout_is_that_of_params_h(planner):
    def numbers(dtype):
        names = [name for name in dtype.names if name != "reserved"]
        return [dtype.itemsize, *(dtype.fields[name][1] for name in names)]

    expected = [n for dtype in (WORK_ITEM, CTA_WORK, MERGE_ITEM, HEADER) for n in numbers(dtype)]
    expected += [CTA_WORK_OFFSET, NOT_CAUSAL, MAX_KV_LEN]
    actual = np.zeros(64, np.int32)
    count = planner.lib.shim_layout(actual.ctypes.data_as(np.ctypeslib.ctypes.c_void_p))
    assert actual[:count].tolist() == expected


@pytest.mark.parametrize("block", range(10))
def test_sampled_problems(planner, block):
    for seed in range(1000 + 60 * block, 1060 + 60 * block):
        check_sample(planner, seed)


def test_no_undefined_behaviour(tmp_path):
    """The samples under the compiler's checks of overflow, alignment and bounds."""
    flags = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    script = Path(__file__).with_name("plan_samples.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(KERNEL_DIR), "200", *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-1000:]


ADVERSARIAL = {
    "batch 0": Problem([], []),
    "one idle request": Problem([1], [0]),
    "16 idle requests": Problem([1] * 16, [0] * 16),
    "no queries": Problem([0] * 300, [4096] * 300),
    "one token": Problem([1], [1]),
    "one long among many short": Problem([1] * 32, [131072] + [300] * 31),
    "one long last": Problem([1] * 300, [1] * 299 + [200000], num_heads=128),
    "mostly idle": Problem([1] * 300, [9000 if b % 37 == 0 else 0 for b in range(300)]),
    "one request more than CTAs": Problem([1] * 265, [4096] * 265),
    "each request one kv tile": Problem([1] * 300, [64] * 300),
    "tile edges": Problem([1] * 9, [63, 64, 65, 127, 128, 129, 0, 1, 2]),
    "queries see nothing": Problem([5, 300, 8], [0, 17, 8], num_heads=12, causal=True),
    "one of a tile's rows sees something": Problem([64], [1], num_heads=1, causal=True),
    "heads 130, verify": Problem([4] * 40, [3000] * 40, num_heads=130, causal=True),
    "chunk of 8192 on a prefix": Problem([8192], [8192 + 5909], num_heads=128, causal=True),
    "chunk of 8192, no prefix": Problem([8192], [8192], num_heads=128, causal=True),
    "mixed prefill and decode": Problem(
        [2471] + [1] * 60, [2471] + list(range(0, 6000, 100)), num_heads=16, causal=True
    ),
    "longest": Problem([1, 1], [MAX_KV_LEN, MAX_KV_LEN], num_heads=20),
    "totals beyond 2^31": Problem([4096], [MAX_KV_LEN], num_heads=64),
    "longest, causal": Problem([3, 300], [MAX_KV_LEN, 5], num_heads=1, causal=True, page_size=64),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("shape", [(8, 64, 264), (32, 32, 188), (64, 64, 132), (16, 64, 1)])
def test_adversarial_problems(planner, name, shape):
    rows, tokens, grid = shape
    problem, tile = ADVERSARIAL[name], planner.tile(rows, tokens)
    plan = planner.plan(problem, tile, grid, capacity=16 << 20)
    check_plan(problem, tile, plan)


def test_prefill_splits_few_row_tiles(planner):
    """Each CTA cuts at most one row tile, so nearly all of the thousands are written directly."""
    problem, tile, grid = ADVERSARIAL["chunk of 8192, no prefix"], planner.tile(64, 64, 1), 132
    plan = planner.plan(problem, tile, grid)
    assert plan.result.num_items >= 8192 * 128 // 64
    assert plan.result.num_merge_items < grid


@pytest.mark.parametrize("batch, rows, grid", [(256, 8, 264), (128, 16, 264), (64, 64, 132)])
def test_ragged_serving_batches_are_balanced(planner, batch, rows, grid):
    """The figure in plan.h: 2 to 11 % above an even share for these shapes."""
    tile = planner.tile(rows)
    item_cost = tile.item_cost / tile.tile_cost
    for seed in range(10):
        rng = np.random.default_rng(seed)
        heads = 128 if rows == 64 else rows
        problem = Problem([1] * batch, rng.integers(1024, 4097, batch).tolist(), num_heads=heads)
        plan = planner.plan(problem, tile, grid)
        costs = [
            sum(item_cost + -(-(int(i["kv_end"]) - int(i["kv_begin"])) // 64) for i in items)
            for items in map(plan.items, range(grid))
        ]
        row_tiles = [-(-visible // 64) for *_, visible in problem.row_tiles(rows)]
        even = (sum(row_tiles) + item_cost * len(row_tiles)) / grid
        assert max(costs) <= 1.12 * even


def test_one_piece_plans_do_not_depend_on_batch_order(planner):
    """Where each CTA has one piece, a request is cut alike wherever it stands in the batch."""
    tile = planner.tile(16)
    rng = np.random.default_rng(7)
    kv_lens = rng.integers(0, 9000, 32)

    def cuts(order):
        problem = Problem([1] * 32, kv_lens[order].tolist(), num_heads=16)
        plan = planner.plan(problem, tile, 264)
        assert not plan.ctas["more_count"].any(), "not a one-piece plan"
        found = {}
        for cta in range(plan.grid):
            for item in plan.items(cta):
                request = int(order[item["q_begin"]])
                found.setdefault(request, []).append((int(item["kv_begin"]), int(item["kv_end"])))
        return found

    expected = cuts(np.arange(32))
    for _ in range(5):
        assert cuts(rng.permutation(32)) == expected
