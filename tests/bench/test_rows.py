"""The shapes and variants that are measured."""

import pytest
from mla_bench.rows import (
    LAYERS,
    NATIVE,
    POOL_TOKENS,
    QUICK_ROWS,
    ROWS,
    VARIANTS,
    extra_variant,
    select,
)


def test_names_are_unique_and_quick_rows_exist():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert set(QUICK_ROWS) <= set(names)
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_fits_the_pool_without_sharing_pages(row):
    # FlashMLA reads every row in pages of 64.
    for page_size in {row.page_size, 64}:
        pages = sum(-(-length // page_size) for length in row.kv_lens)
        assert pages * page_size <= POOL_TOKENS


def test_the_shapes_of_the_goal_are_there():
    shapes = {(row.heads, row.batch, row.kv_len, row.qo_len): row for row in ROWS[:12]}
    goals = {
        (8, 1, 500, 1): 4.5,
        (8, 1, 4096, 1): 6.5,
        (8, 1, 32_768, 1): 10,
        (16, 16, 4096, 1): 16,
        (8, 32, 8192, 1): 42,
        (16, 32, 8192, 1): 46,
        (16, 16, 4096, 4): 24,
        (64, 32, 8192, 1): 95,
        (128, 32, 8192, 1): 180,
        (8, 1, 500, 256): 30,
    }
    assert {shape: shapes[shape].target_us for shape in goals} == goals
    assert all(row.causal == (row.qo_len > 1) for row in ROWS)


def test_uneven_rows_are_uneven_and_reproducible():
    ragged = next(row for row in ROWS if row.label == "ragged")
    assert (min(ragged.kv_lens) >= 1024, max(ragged.kv_lens)) == (True, 4096)
    assert len(set(ragged.kv_lens)) > 100
    assert sum(ragged.kv_lens) == 335_879  # the same lengths on every machine
    skewed = next(row for row in ROWS if row.label == "skewed")
    assert sorted(skewed.kv_lens)[-2:] == [512, 65_536]


def test_loads_only_keeps_the_plan_variables_and_drops_the_dequant():
    variant = next(v for v in VARIANTS if v.name == "like-sm86")
    assert variant.loads_only_env() == {
        "MLA_FP8KV_SMEM_LIMIT": "101376",
        "MLA_FP8KV_CTAS_PER_SM": "1",
        "MLA_FP8KV_LOADS_ONLY": "1",
    }
    assert VARIANTS[0].name == NATIVE and not VARIANTS[0].env


def test_select():
    assert select(ROWS, None, "row") == ROWS
    assert select(ROWS, "none", "row") == ()
    assert [r.name for r in select(ROWS, "h8-b32-kv8192, h8-b1-kv500", "row")] == [
        "h8-b1-kv500",
        "h8-b32-kv8192",
    ]
    serving = select(ROWS, "serving", "row")
    assert serving and all(row.group == "serving" for row in serving)
    with pytest.raises(ValueError, match="unknown row h9: known are"):
        select(ROWS, "h9", "row")


def test_kv_of_the_large_rows_does_not_stay_in_l2():
    # 60 MB of L2: a row's KV of all layers must be beyond it, or the flushed time is reported too.
    large = [row for row in ROWS if row.kv_tokens * 576 >= 8e6]
    assert all(LAYERS * row.kv_tokens * 576 > 60 << 20 for row in large)


def test_an_extra_variant_sets_variables_of_this_project_only():
    variant = extra_variant("t32:MLA_FP8KV_TILE_ROWS=32,MLA_FP8KV_DEQUANT=bits")
    assert variant.env == {"MLA_FP8KV_TILE_ROWS": "32", "MLA_FP8KV_DEQUANT": "bits"}
    for text in ("t32", ":MLA_FP8KV_TILE_ROWS=1", "t:PATH=/", "t:MLA_FP8KV_TILE_ROWS=", "t:"):
        with pytest.raises(ValueError, match="an extra variant is NAME:"):
            extra_variant(text)
    with pytest.raises(ValueError, match="bits is a variant already"):
        extra_variant("bits:MLA_FP8KV_DEQUANT=bits")
