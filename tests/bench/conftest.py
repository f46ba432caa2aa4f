"""Puts bench/ on the path, and makes result files of invented numbers for the tests."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))


def make_row(name="h8-b32-kv8192", variant="native", us=50.0, **changes) -> dict:
    """A valid row record; 262,144 tokens of 8 heads."""
    row = {
        "name": name,
        "group": "core",
        "heads": 8,
        "batch": 32,
        "kv_len": 8192,
        "kv_tokens": 262_144,
        "qo_len": 1,
        "causal": False,
        "page_size": 1,
        "kv_dtype": "e4m3",
        "group_scales": False,
        "variant": variant,
        "backend": "fa2",
        "us": us,
        "spread_us": 0.2,
        "us_l2_flushed": None,
        "loads_only_us": 40.0,
        "floor_us": 35.0,
        "target_us": 42,
        "gbps": 262_144 * 576 / us / 1e3,
        "gbps_per_sm": 262_144 * 576 / us / 1e3 / 100,
        "percent_of_floor": 100 * 35.0 / us,
        "tflops": 80.0,
        "plan": [1, 0, 264],
        "rel_err": 1.6e-3,
        "baselines": {"fa3-bf16": 100.0},
        "baseline_rel_err": {"fa3-bf16": 2.1e-3},
        "ratios": {"fa3-bf16": 100.0 / us},
        "unavailable": {},
    }
    return {**row, **changes}


def make_result(*rows, **changes) -> dict:
    """A valid result with the given rows."""
    result = {
        "schema": 1,
        "run_id": "first",
        "complete": True,
        "command": "python bench/run.py",
        "machine": {"gpu": "Invented GPU", "sms": 100, "l2_bytes": 1 << 20},
        "copy_gbps": 4000.0,
        "copy_gbps_end": 4000.0,
        "gemm_tflops": 700.0,
        "rows": list(rows),
        "unavailable": {},
        "host": None,
    }
    return {**result, **changes}


@pytest.fixture(name="make_row")
def _make_row():
    return make_row


@pytest.fixture(name="make_result")
def _make_result():
    return make_result
