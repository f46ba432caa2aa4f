"""Bytes, operations and floors of a shape, against numbers worked out by hand."""

import pytest
from mla_bench.roofline import PARTS_100K, derived, floor_us, flops, kv_bytes
from mla_bench.rows import Row


def test_bytes_count_each_token_once_whatever_the_rows():
    assert kv_bytes(Row(8, (8192,) * 32)) == 262_144 * 576
    assert kv_bytes(Row(128, (8192,) * 32, qo_len=4, causal=True)) == 262_144 * 576
    assert kv_bytes(Row(8, (100, 1))) == 101 * 576
    assert kv_bytes(Row(8, (100, 1), group_scales=True)) == 101 * (576 + 16)


def test_floor_is_bytes_over_copy_bandwidth():
    # The design's own figure for this shape at 4.22 TB/s.
    assert floor_us(Row(8, (8192,) * 32), 4220) == pytest.approx(35.78, abs=0.01)
    assert floor_us(Row(8, (500,)), 4220) == pytest.approx(0.068, abs=0.001)


def test_flops_of_decode_and_of_causal_rows():
    assert flops(Row(8, (500,))) == 8 * 500 * 2176
    # Queries 0..3 of a request of 10 tokens see 7, 8, 9 and 10 of them.
    assert flops(Row(2, (10,), qo_len=4, causal=True)) == 2 * (7 + 8 + 9 + 10) * 2176
    # With more queries than tokens the first ones see nothing.
    assert flops(Row(1, (2,), qo_len=4, causal=True)) == (0 + 0 + 1 + 2) * 2176
    assert flops(Row(2, (10,), qo_len=4)) == 2 * 40 * 2176


def test_derived_figures():
    row = Row(16, (1000,) * 10)
    figures = derived(row, us=8.0, copy_gbps=4000.0, num_sms=100)
    assert figures["gbps"] == pytest.approx(10_000 * 576 / 8e-6 / 1e9)
    assert figures["gbps_per_sm"] == pytest.approx(figures["gbps"] / 100)
    assert figures["floor_us"] == pytest.approx(1.44)
    assert figures["percent_of_floor"] == pytest.approx(18.0)
    assert figures["tflops"] == pytest.approx(16 * 10_000 * 2176 / 8e-6 / 1e12)


def test_parts_are_those_with_the_small_block_limit():
    assert {part.sm for part in PARTS_100K} == {86, 89, 120, 121}
    pro = next(part for part in PARTS_100K if part.name.startswith("RTX PRO 6000"))
    assert pro.gbps_per_sm == pytest.approx(9.53, abs=0.01)
