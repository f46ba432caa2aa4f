"""The shipped kernels, executed on the CPU, against float64 attention.

Every case also fails on any fault simt.h sees: races, missing waits, reads out of bounds or of
unwritten memory.
All cache bytes that no page table entry reaches are NaN codes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_call import (
    TILES,
    Case,
    Inputs,
    check,
    expect,
    fp8_values,
    from_16_bits,
    make_inputs,
    mismatch,
    run,
    to_16_bits,
    to_fp8,
)

FIRST, LAST = list(TILES)[0], list(TILES)[-1]
LARGEST_MMA = "Rows64"


def parametrize(**cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


# ---- every variant, on a batch that has everything: splits, several items a CTA, partly filled
# tiles, causal rows that see nothing, empty requests

MIXED = [(3, 150), (1, 0), (0, 7), (2, 1), (1, 33), (0, 0), (5, 3)]

VARIANTS = {
    "e4m3": {},
    "e4m3 placed": {"bits": True},  # as SM80 and SM86 compile it
    "e5m2": {"e5m2": True},
    "scales": {"group_scales": True},
    "no kpe": {"kpe_dim": 0},
}


def exists(tile: str, variant: str) -> bool:
    """SM90 has wgmma, and the conversion: no kernel places bits for wgmma."""
    return not (tile.startswith("Wgmma") and "placed" in variant)


def every(*variants: str) -> pytest.MarkDecorator:
    """All tiles with these variants."""
    pairs = [(tile, variant) for variant in variants for tile in TILES if exists(tile, variant)]
    return pytest.mark.parametrize(("tile", "variant"), pairs)


@parametrize(
    **{
        f"{tile}, {name}, grid {grid}": Case(
            MIXED, 12, tile, causal=True, page_size=3, bf16=index % 2 == 0, grid=grid, **variant
        )
        for tile in TILES
        for index, (name, variant) in enumerate(VARIANTS.items())
        if exists(tile, name)
        for grid in (3, 40)  # several items a CTA; several CTAs a row
    },
    **{
        f"{tile}, {name}": Case(MIXED, 5, tile, page_size=3, **variant)
        for tile, name, variant in (
            (FIRST, "scales placed", {"bits": True, "group_scales": True}),
            (FIRST, "scales, e5m2, no kpe", {"group_scales": True, "e5m2": True, "kpe_dim": 0}),
            (LARGEST_MMA, "no kpe placed", {"bits": True, "kpe_dim": 0}),
        )
    },
)
def test_variants(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"{tile}, {tokens} tokens": Case([(1, tokens)], 8, tile, grid=1)
        for tile in TILES
        for tokens in (
            *(1, 2, 15, 16, 17),
            *(TILES[tile].tokens - 1, TILES[tile].tokens, TILES[tile].tokens + 1),
            *(3 * TILES[tile].tokens - 1, 3 * TILES[tile].tokens, 4 * TILES[tile].tokens + 1),
        )
    }
)
def test_kv_len_at_tile_edges(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"{tile}, {heads} heads x {queries}": Case([(queries, 70)], heads, tile)
        for tile in TILES
        for heads, queries in (
            *((1, 1), (3, 1), (8, 1), (12, 1), (16, 1), (20, 1), (64, 1), (128, 1)),
            *((1, 7), (3, 3), (20, 2)),
        )
    }
)
def test_heads(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"{tile}, grid {grid}": Case([(1, 500), (2, 90)], 16, tile, grid=grid)
        for tile in TILES
        for grid in (1, 2, 7, 12)
    },
    # More partials than the merge reads at once; and so many that they are shared out.
    **{
        f"{tile}, {count} partials{' with scales' * scaled}": Case(
            [(1, 150), (1, 64 * count), (1, 0), (1, 70)],
            3,
            tile,
            grid=count + 8,
            group_scales=scaled,
        )
        for tile, scaled in ((FIRST, False), (LAST, False), (FIRST, True))
        for count in (20, 40)
    },
)
def test_split_kv(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"{tile}, q {queries}, kv {tokens}": Case([(queries, tokens)], 4, tile, causal=True, grid=2)
        for tile in TILES
        for queries, tokens in ((2, 64), (2, 65), (8, 70), (9, 9), (5, 2), (40, 100))
    }
)
def test_causal(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"page size {page}, {name} caches": Case(
            [(1, tokens), (1, 40)], 8, FIRST, page_size=page, joint_cache=name == "joint"
        )
        for page, tokens in ((1, 70), (3, 80), (16, 129), (64, 200), (128, 129))
        for name in ("joint", "separate")
    }
)
def test_pages(case: Case) -> None:
    check(case)


SCALES = {
    "both small": {"ckv_scale": 0.06, "kpe_scale": 0.06},
    "both large": {"ckv_scale": 4.0, "kpe_scale": 4.0},
    "unequal": {"ckv_scale": 0.06, "kpe_scale": 4.0},
    "unequal, the other way": {"ckv_scale": 2.0, "kpe_scale": 0.3},
}


@parametrize(
    **{
        f"{name}, {variant}, {tile}": Case(
            [(1, 200), (1, 30)],
            8,
            tile,
            sm_scale=0.02 / scales["ckv_scale"],
            **scales,
            **VARIANTS[variant],
        )
        for name, scales in SCALES.items()
        for tile, variant in (
            (FIRST, "e4m3"),
            (LAST, "e5m2"),
            (LARGEST_MMA, "e4m3 placed"),
            (FIRST, "scales"),
        )
    }
)
def test_scales(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"{tile}, {'natural' if natural else 'base 2'}, grid {grid}": Case(
            [(1, 150), (1, 0)], 8, tile, lse_base_e=natural, grid=grid
        )
        for tile in TILES
        for natural in (False, True)
        for grid in (1, 3)
    },
    **{"no lse": Case([(1, 150), (1, 0)], 8, FIRST, lse=False)},
)
def test_lse(case: Case) -> None:
    check(case)


@parametrize(
    **{
        f"bf16, q x {magnitude:g}, {tile}": Case(
            [(1, 90)], 8, tile, q_magnitude=magnitude, sm_scale=0.04 / magnitude
        )
        for magnitude in (1e30, 1e6, 1e-30)
        for tile in TILES
    },
    **{
        f"fp16, q x {magnitude:g}": Case(
            [(1, 90)], 8, FIRST, bf16=False, q_magnitude=magnitude, sm_scale=0.04 / magnitude
        )
        for magnitude in (1e4, 1e-3)
    },
)
def test_query_magnitude(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("tile", TILES)
def test_rows_of_different_magnitude(tile: str) -> None:
    """Each row of Q has its own power-of-two scale; a row of zeros attends to all tokens alike."""
    case = Case([(1, 90)], 8, tile, sm_scale=1.0)
    inputs = make_inputs(case)
    for array in (inputs.q_nope, inputs.q_pe):
        values = from_16_bits(array, True) * 0.04 * 10.0 ** np.arange(-28, 4, 4)[:, None]
        values[:, 3] = 0
        array[...] = to_16_bits(values, True)
    assert mismatch(case, inputs, run(case, inputs), expect(case, inputs)) == ""


@pytest.mark.parametrize("tile", TILES)
def test_outliers_in_a_row_of_q(tile: str) -> None:
    """The scale of a row is that of its largest element, wherever it is."""
    case = Case([(1, 90)], 8, tile, sm_scale=4e-8)
    inputs = make_inputs(case)
    for head in range(8):
        dim = 77 * head + 10
        values = inputs.q_nope if dim < 512 else inputs.q_pe
        values[0, head, dim % 512] = to_16_bits(np.array(1e7), True)
    assert mismatch(case, inputs, run(case, inputs), expect(case, inputs)) == ""


@pytest.mark.parametrize(
    ("tile", "order", "kv_tiles", "grid"),
    [
        *((tile, order, 6, 2) for tile in TILES for order in ("rising", "falling", "spikes")),
        (FIRST, "rising", 20, 20),  # more partials than the merge reads at once
    ],
)
def test_moving_maximum(tile: str, order: str, kv_tiles: int, grid: int) -> None:
    """Scores far above and below the running reference, within and across tiles and partials."""
    case = Case([(1, kv_tiles * TILES[tile].tokens)], 8, tile, grid=grid, sm_scale=0.05)
    inputs = make_inputs(case)
    tokens = case.requests[0][1]
    size = {
        "rising": np.linspace(0, 30, tokens),
        "falling": np.linspace(30, 0, tokens),
        "spikes": np.where(np.arange(tokens) % 37 == 5, np.arange(tokens) % 5 * 20, 0),
    }[order]
    # Dim 0 of the queries and of the tokens' kpe carries the score; the rest is noise.
    codes = np.argsort(np.abs(fp8_values(False)[:0x7F][None] - 2 * size[:, None]), axis=1)[:, 0]
    inputs.kpe[inputs.kv_indices, 0, 0] = codes
    inputs.q_pe[..., 0] = to_16_bits(np.full((2, 8), 40.0), True)
    assert mismatch(case, inputs, run(case, inputs), expect(case, inputs)) == ""


@pytest.mark.parametrize("variant", ["e4m3", "e5m2", "no kpe"])
def test_staggered(variant: str) -> None:
    """Several items of one CTA, whose references rise in halves of either warpgroup."""
    requests = [(1, 5 * 128 + 70), (1, 128), (2, 300), (1, 64), (1, 3 * 128 + 65)]
    case = Case(requests, 8, "WgmmaRows64", grid=1, sm_scale=0.05, **VARIANTS[variant])
    for reverse in (False, True):
        inputs = make_inputs(dataclasses.replace(case, reverse_warps=reverse))
        # Dim 0 carries most of the score, and rises by 64 tokens, twice as fast after 192.
        step = np.arange(len(inputs.kv_indices)) // 64
        size = np.minimum(step + np.maximum(step - 3, 0), 14) * 2.0
        inputs.ckv[inputs.kv_indices, 0, 0] = to_fp8(size, case.e5m2)
        inputs.q_nope[..., 0] = to_16_bits(np.array(80.0), True)
        outcome = run(dataclasses.replace(case, reverse_warps=reverse), inputs)
        assert mismatch(case, inputs, outcome, expect(case, inputs)) == ""


# ---- whatever else


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)

    def pick(values):
        return values[rng.integers(len(values))]

    causal = bool(rng.integers(2))
    heads = pick([1, 2, 5, 8, 11, 16, 24, 33])
    scale = pick([1.0, 0.06, 4.0])
    tile = pick(list(TILES))
    variant = pick([name for name in VARIANTS if exists(tile, name)])
    return Case(
        [
            (int(rng.integers(5)), int(pick([0, 1, 30, 64, 65, 200])))
            for _ in range(pick([1, 3, 6]))
        ],
        heads,
        tile,
        causal=causal,
        page_size=pick([1, 1, 2, 7, 64]),
        bf16=bool(rng.integers(2)),
        ckv_scale=scale,
        kpe_scale=pick([scale, 1.0]),
        sm_scale=pick([0.04, 0.3]) / scale,
        lse=bool(rng.integers(4)),
        lse_base_e=bool(rng.integers(2)),
        grid=int(rng.integers(1, 30)),
        merge_grid=int(rng.integers(1, 5)),
        q_magnitude=pick([1.0, 1.0, 10.0, 0.01]),
        joint_cache=bool(rng.integers(2)),
        reverse_warps=bool(rng.integers(2)),
        seed=seed,
        extra_tokens=int(rng.integers(3)),
        **VARIANTS[variant],
    )


@parametrize(**{f"seed {seed}": random_case(seed) for seed in range(60)})
def test_random_cases(case: Case) -> None:
    check(case)


# ---- all 256 codes


@every("e4m3", "e4m3 placed", "e5m2")
def test_all_codes_as_value(tile: str, variant: str) -> None:
    """One token a request: the output is its 512 bytes exactly. Codes visit all bytes of a word."""
    case = Case([(1, 1)] * 4, 8, tile, **VARIANTS[variant])
    inputs = make_inputs(case)
    values = fp8_values(case.e5m2)
    for b in range(4):
        codes = (np.arange(512) + b) % 256
        codes[~np.isfinite(values[codes])] = 0
        inputs.ckv[inputs.kv_indices[b]] = codes
    outcome = run(case, inputs)
    assert outcome.faults == ""
    want = values[inputs.ckv[inputs.kv_indices[:4], 0]][:, None].repeat(8, axis=1)
    np.testing.assert_array_equal(from_16_bits(outcome.out[:4], True), want)


@every("e4m3", "e4m3 placed", "e5m2")
def test_all_codes_as_key(tile: str, variant: str) -> None:
    """One token, one-hot queries: the LSE of row r is the byte at dim r. All 576 dims."""
    case = Case([(9, 1), (9, 1)], 64, tile, **VARIANTS[variant], sm_scale=float(np.log(2)))
    inputs = make_inputs(case)
    values = fp8_values(case.e5m2)
    inputs.q_nope[...] = 0
    inputs.q_pe[...] = 0
    one = to_16_bits(np.array(1.0), True)
    for b in range(2):
        codes = (np.arange(576) * 3 + 128 * b) % 256
        codes[~np.isfinite(values[codes])] = 0
        page = inputs.kv_indices[b]
        inputs.ckv[page, 0], inputs.kpe[page, 0] = codes[:512], codes[512:]
        for dim in range(576):
            token, head = 9 * b + dim // 64, dim % 64
            if dim < 512:
                inputs.q_nope[token, head, dim] = one
            else:
                inputs.q_pe[token, head, dim - 512] = one
    outcome = run(case, inputs)
    assert outcome.faults == ""
    pages = inputs.kv_indices
    want = values[np.concatenate([inputs.ckv[pages, 0], inputs.kpe[pages, 0]], axis=1)]
    np.testing.assert_allclose(outcome.lse[:18].reshape(2, 576), want, rtol=2**-21, atol=0)


NAN_CODES = {
    "e4m3": [0x7F, 0xFF],
    "e4m3 placed": [0x7F, 0xFF],
    "e5m2": [0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF],
}


@every(*NAN_CODES)
def test_nan_codes_in_referenced_slots(tile: str, variant: str) -> None:
    """NaN (and infinity) in one token spreads as in float64 attention, and to no other request."""
    for index, code in enumerate(NAN_CODES[variant]):
        case = Case([(1, 70), (1, 70), (1, 3)], 8, tile, grid=2, **VARIANTS[variant])
        inputs = make_inputs(case)
        victim = inputs.kv_indices[70 + (11 + 23 * index) % 70]
        if index % 2 == 0:
            inputs.ckv[victim, 0, 101 + 7 * index] = code
        else:
            inputs.kpe[victim, 0, 5 * index] = code
        outcome = run(case, inputs)
        assert outcome.faults == ""
        out = from_16_bits(outcome.out[:3], True)
        with np.errstate(invalid="ignore"):
            expected = expect(case, inputs)
        np.testing.assert_array_equal(np.isnan(out), np.isnan(expected.out[:3]))
        np.testing.assert_array_equal(np.isnan(outcome.lse), np.isnan(expected.lse))
        assert np.isnan(out[1]).any()
        for b in (0, 2):
            assert (np.abs(out[b] - expected.out[b]) <= expected.out_bound[b]).all()


# ---- the same bits


@pytest.mark.parametrize("tile", TILES)
def test_bits_do_not_depend_on_layout_or_schedule(tile: str) -> None:
    case = Case([(2, 150), (1, 40)], 12, tile, causal=True)
    inputs = make_inputs(case)
    first = run(case, inputs)
    other = dataclasses.replace(case, page_size=3, joint_cache=False, reverse_warps=True)
    moved = make_inputs(other)
    start = 0
    for b, (_, tokens) in enumerate(case.requests):
        pages = inputs.kv_indices[start : start + tokens]
        start += tokens
        target = moved.kv_indices[moved.kv_indptr[b] :]
        token = np.arange(tokens)
        moved.ckv[target[token // 3], token % 3] = inputs.ckv[pages, 0]
        moved.kpe[target[token // 3], token % 3] = inputs.kpe[pages, 0]
    moved = dataclasses.replace(moved, q_nope=inputs.q_nope, q_pe=inputs.q_pe)
    second = run(other, moved)
    assert first.faults == second.faults == ""
    np.testing.assert_array_equal(first.out, second.out)
    np.testing.assert_array_equal(first.lse, second.lse)


# ---- the layout's promise


@every(*VARIANTS)
def test_no_bank_conflicts(tile: str, variant: str) -> None:
    """None in the work on a tile. Staging Q stores 8 of every 16 bytes, in two passes."""

    def conflicts(tiles: int) -> dict[str, tuple[int, int]]:
        case = Case(
            [(1, tiles * TILES[tile].tokens)], TILES[tile].rows, tile, grid=1, **VARIANTS[variant]
        )
        outcome = run(dataclasses.replace(case, count_conflicts=True), make_inputs(case))
        assert outcome.faults == ""
        return outcome.conflicts

    few, many = conflicts(1), conflicts(4)
    free = {"ldmatrix", "ldmatrix.trans", "cp.async", "st.shared"}
    if variant != "scales":  # group scales are read where they lie, a few words of 16 bytes a token
        free.add("ld.shared")
    for op in free:
        assert many[op][0] > few[op][0]
        assert many[op][1] == few[op][1], (op, few[op], many[op])
    assert all(few[op][1] == 0 for op in free - {"st.shared"})


# ---- the bounds themselves


def good() -> tuple[Case, Inputs]:
    case = Case([(1, 1200), (1, 60)], 8, FIRST, grid=6)
    return case, make_inputs(case)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 0,
        lambda out: out * 1.02,
        lambda out: np.roll(out, 1, axis=2),
        lambda out: np.roll(out, 1, axis=1),
        lambda out: out[..., [i ^ 1 for i in range(512)]],
        lambda out: out + (np.arange(512) == 100) * 0.05,
    ],
    ids=["zeros", "2 % too large", "dims shifted", "heads shifted", "dims swapped", "one dim off"],
)
def test_bounds_reject_wrong_outputs(spoil) -> None:
    case, inputs = good()
    outcome, expected = run(case, inputs), expect(case, inputs)
    assert mismatch(case, inputs, outcome, expected) == ""
    outcome.out[:2] = to_16_bits(spoil(from_16_bits(outcome.out[:2], True)), True)
    assert "out: " in mismatch(case, inputs, outcome, expected)


def test_bounds_reject_wrong_lse() -> None:
    case, inputs = good()
    outcome, expected = run(case, inputs), expect(case, inputs)
    outcome.lse *= np.float32(np.log(2))
    assert "lse: " in mismatch(case, inputs, outcome, expected)


def test_writes_beyond_the_last_row_are_seen() -> None:
    case, inputs = good()
    outcome, expected = run(case, inputs), expect(case, inputs)
    outcome.out[-1, 0, 0] = 0
    assert "rows beyond" in mismatch(case, inputs, outcome, expected)
