"""What a plan refuses, in which words. Nothing is written then: Planner.plan checks that."""

import numpy as np
import pytest
from plan_checker import MAX_KV_LEN, MAX_PACKED_ROWS, Problem

GOOD = Problem([1, 2, 1], [10, 20, 30])


def indptr(*values):
    return np.array(values, np.int32)


BAD_ARRAYS = [
    (
        (indptr(0, 3, 2, 4), indptr(0, 10, 30, 60), indptr(10, 20, 30)),
        "qo_indptr",
        "qo_indptr must not be negative or decrease, got 2 where at least 3 was expected of "
        "request 1.",
    ),
    (
        (indptr(-1, 1, 2, 4), indptr(0, 10, 30, 60), indptr(10, 20, 30)),
        "qo_indptr",
        "qo_indptr must not be negative or decrease, got -1 where at least 0 was expected of "
        "request 0.",
    ),
    (
        (indptr(0, 1, 3, 4), indptr(0, 10, 30, 29), indptr(10, 20, 30)),
        "kv_indptr",
        "kv_indptr must not be negative or decrease, got 29 where at least 30 was expected of "
        "request 2.",
    ),
    (
        (indptr(0, 1, 3, 4), indptr(-5, 10, 30, 60), indptr(10, 20, 30)),
        "kv_indptr",
        "kv_indptr must not be negative or decrease, got -5 where at least 0 was expected of "
        "request 0.",
    ),
    (
        (indptr(0, 1, 3, 4), indptr(0, 10, 30, 60), indptr(10, -20, 30)),
        "kv_len",
        "kv_len must be 0..1073741823, got -20 as that of request 1.",
    ),
    (
        (indptr(0, 1, 3, 4), indptr(0, 10, 30, 60), indptr(10, 20, MAX_KV_LEN + 1)),
        "kv_len",
        "kv_len must be 0..1073741823, got 1073741824 as that of request 2.",
    ),
    (
        (indptr(0, 1, 2**31 - 1, 2**31 - 1), indptr(0, 10, 30, 60), indptr(10, 20, 30)),
        "packed_rows",
        "qo_len * num_heads of request 1 must be at most 1073741823, got 17179869168.",
    ),
]


@pytest.mark.parametrize("arrays, status, sentence", BAD_ARRAYS)
def test_bad_arrays(planner, arrays, status, sentence):
    plan = planner.plan(GOOD, planner.tile(8), 264, arrays=arrays)
    assert (plan.status, planner.error(plan)) == (status, sentence)


@pytest.mark.parametrize("heads", [0, -8])
def test_num_heads(planner, heads):
    plan = planner.plan(Problem([1], [1], num_heads=heads), planner.tile(8), 264)
    assert plan.status == "num_heads"
    assert planner.error(plan) == f"num_heads must be positive, got {heads}."


def test_launch_without_ctas(planner):
    plan = planner.plan(GOOD, planner.tile(8), 0)
    assert plan.status == "bad_launch"
    assert planner.error(plan) == "a launch needs a tile and at least one CTA, got a grid of 0."


def test_more_row_tiles_than_can_be_addressed(planner):
    """Refused at once, not after a walk over 134 million row tiles."""
    problem = Problem([MAX_PACKED_ROWS], [5], num_heads=1)
    plan = planner.plan(problem, planner.tile(8), 264)
    assert plan.status == "too_many_items"
    assert planner.error(plan) == (
        "the requests need 134217728 row tiles, at most 67107937 are supported."
    )


def test_integer_workspace(planner):
    problem = Problem([1] * 300, [0] * 300)
    tile = planner.tile(8)
    needed = 64 + 264 * 48 + 300 * 32  # header, CTA records, a merge item for each idle request
    assert planner.plan(problem, tile, 264, capacity=needed).status == "ok"
    plan = planner.plan(problem, tile, 264, capacity=needed - 1)
    assert plan.status == "int_capacity"
    assert planner.error(plan) == (
        f"the integer workspace must hold {needed} bytes for this plan, got {needed - 1}."
    )


def test_float_workspace(planner):
    """The need depends on the grid alone: a batch of 0 is refused like any other."""
    for problem in (GOOD, Problem([], [])):
        assert planner.plan(problem, planner.tile(8), 264, slots=528).status == "ok"
        plan = planner.plan(problem, planner.tile(8), 264, slots=527)
        assert plan.status == "float_capacity"
        assert planner.error(plan) == (
            "the float workspace must hold 528 partial results, got room for 527."
        )
    assert planner.lib.shim_max_slots(264) == 528
