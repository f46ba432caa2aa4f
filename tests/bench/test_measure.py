"""The whole harness on the CPU, with a stand-in for flashinfer and an invented clock."""

import os
import sys

import pytest

torch = pytest.importorskip("torch", reason="the harness needs torch")

import fake_flashinfer  # noqa: E402
from mla_bench import case, contenders, machine, measure, results, timing  # noqa: E402
from mla_bench.rows import ROWS, VARIANTS, Row, select  # noqa: E402


@pytest.fixture(name="small_pools", autouse=True)
def _small_pools(monkeypatch):
    torch.set_num_threads(1)  # the tensors are small
    for name, module in fake_flashinfer.packages().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(case, "WORKSPACE_BYTES", 16)

    class Graph:
        def __init__(self, run_layer):
            for layer in range(8):
                run_layer(layer)

        def time(self, flush_l2=False):
            return timing.Timing(9.0 if flush_l2 else 8.0, 0.1)

    monkeypatch.setattr(timing, "LayerGraph", Graph)
    monkeypatch.setattr(timing, "copy_gbps", lambda: 4000.0)
    monkeypatch.setattr(timing, "gemm_tflops", lambda: 700.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    facts = {"gpu": "Invented", "sms": 100, "l2_bytes": 8 * 600 * 576}
    monkeypatch.setattr(machine, "facts", lambda: facts)

    def pools(kv_dtype, device):
        return case.Pools(kv_dtype, device, tokens=2048)

    monkeypatch.setattr(measure, "Pools", pools)
    return pools


ROW = Row(4, (500, 70), target_us=5.0)


def run(path, rows=(ROW,), variants="native", baselines="none"):
    one = measure.Run(["--test"], device="cpu")
    selected = select(contenders.BASELINES, baselines, "baseline")
    one.measure(rows, select(VARIANTS, variants, "variant"), selected, False, path)
    return results.load(path)


def test_a_run_measures_checks_and_stores(tmp_path):
    result = run(tmp_path / "r.json", variants="native,smem100k", baselines=None)
    assert result["complete"] and result["command"] == "python bench/run.py --test"
    native, small = result["rows"]
    assert (native["us"], native["us_l2_flushed"], native["loads_only_us"]) == (8.0, 9.0, 8.0)
    assert native["floor_us"] == pytest.approx(570 * 576 / 4e6)
    assert 1e-4 < native["rel_err"] < 3e-3  # the output is rounded to BF16
    assert (native["plan"], small["plan"]) == ([0], [101_376])  # of the stand-in
    measured = {"cast+fa2", "cast+fa3", "gather+cast+fa2", "fa2-bf16", "fa3-bf16", "fa3-fp8"}
    assert set(native["baselines"]) == measured
    assert all(1e-4 < error < 3e-3 for error in native["baseline_rel_err"].values())
    assert native["unavailable"]["flashmla-bf16"] == "Unavailable: sgl-flash-mla is not installed"
    assert "SGLang is not installed" in native["unavailable"]["sglang-triton-fp8"]


@pytest.mark.parametrize(
    "row",
    [
        Row(4, (9, 30), qo_len=3, causal=True),
        Row(4, (130, 64, 1), page_size=64),
        Row(20, (33,), kv_dtype="e5m2"),
        Row(4, (40,), group_scales=True),
        Row(2, (3,), qo_len=2, causal=True),
    ],
    ids=lambda row: row.name,
)
def test_every_kind_of_row_reaches_the_wrapper_right(tmp_path, row):
    result = run(tmp_path / "r.json", rows=(row,), baselines="cast+fa2,gather+cast+fa2,fa3-fp8")
    (record,) = result["rows"]
    assert record["rel_err"] < 3e-3
    scaled, e5m2 = row.group_scales, row.kv_dtype == "e5m2"
    assert ("fa3-fp8" in record["baselines"]) == (not e5m2)
    assert ("cast+fa2" in record["baselines"]) == (not scaled)
    if e5m2:
        assert record["unavailable"]["fa3-fp8"] == "RuntimeError: fa3 takes no e5m2"


def test_a_wrong_answer_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_flashinfer.Wrapper, "broken", True)
    result = run(tmp_path / "r.json", baselines="fa2-bf16")
    assert result["rows"] == []
    assert result["unavailable"]["h4-b2-kv500 native"] == "WrongResult: relative error 1"


def test_an_output_that_is_not_written_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_flashinfer.Wrapper, "run", lambda self, *, out, **_: out)
    result = run(tmp_path / "r.json")
    assert result["unavailable"]["h4-b2-kv500 native"] == "WrongResult: relative error nan"


def test_a_build_variable_without_effect_is_not_reported_as_a_variant(tmp_path):
    result = run(tmp_path / "r.json", variants="native,bits")
    assert [row["variant"] for row in result["rows"]] == ["native"]
    assert "MLA_FP8KV_DEQUANT selected the default module" in str(result["unavailable"])


def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("MLA_FP8KV_SMEM_LIMIT", "7")
    with (
        pytest.raises(RuntimeError),
        contenders.environment({"MLA_FP8KV_SMEM_LIMIT": "8", "MLA_FP8KV_NEW": "1"}),
    ):
        assert os.environ["MLA_FP8KV_SMEM_LIMIT"] == "8"
        raise RuntimeError
    assert os.environ["MLA_FP8KV_SMEM_LIMIT"] == "7" and "MLA_FP8KV_NEW" not in os.environ


def test_serving_rows_get_no_device_variants(tmp_path):
    row = next(row for row in ROWS if row.label == "skewed")
    small = Row(4, (40, 3), label=row.label, group=row.group)
    result = run(tmp_path / "r.json", rows=(small,), variants="native,auto,bits,smem100k")
    assert [record["variant"] for record in result["rows"]] == ["native", "auto"]


def test_attention_is_the_definition():
    torch.manual_seed(0)
    q, kv = torch.randn(3, 2, 576).double(), torch.randn(5, 576).double()
    answer = case.attention(q, kv, causal=True)
    for i in range(3):
        seen = kv[: 5 - 3 + i + 1]
        for h in range(2):
            weights = torch.exp(seen @ q[i, h] / 192**0.5)
            expected = (weights[:, None] * seen[:, :512]).sum(0) / weights.sum()
            assert torch.allclose(answer[i, h], expected, rtol=1e-10)
    everything = case.attention(q, kv, causal=False)
    assert torch.equal(everything[2], answer[2]) and not torch.allclose(everything[0], answer[0])


def test_page_tables_are_random_disjoint_and_dense(small_pools):
    row = Row(4, (130, 64, 1), page_size=16)
    built = case.Case(row, small_pools("e4m3", "cpu"))
    table = built.table
    assert table is built.table_of(16) and table.indptr.tolist() == [0, 9, 13, 14]
    slots = table.slots(row.kv_lens)
    assert len(set(slots.tolist())) == len(slots) == 195
    assert (slots[:16] == table.indices[0] * 16 + torch.arange(16)).all()
    assert not (table.indices.diff() == 1).all()
    dense = table.dense()
    assert dense.shape == (3, 9) and dense[1, :4].tolist() == table.indices[9:13].tolist()
    with pytest.raises(ValueError, match="needs 129 pages of 16 tokens, the pool has 128"):
        case.Case(Row(4, (2049,), page_size=16), built.pools).table  # noqa: B018


def test_pools_hold_fresh_finite_noise(small_pools):
    pools = small_pools("e4m3", "cpu")
    values = torch.stack([pool.float() for pool in pools.fp8])
    assert values.isfinite().all() and 0.9 < values.std() < 1.1
    assert not torch.equal(values[0], values[1])
    assert torch.equal(pools.bf16[3].float(), values[3])


def test_no_plan_meets_the_workspace_of_an_earlier_one(small_pools):
    addresses = set()
    for kv_dtype in ("e4m3", "e5m2"):
        pools = small_pools(kv_dtype, "cpu")
        first, second = pools.workspace(), pools.workspace()
        assert first.data_ptr() != second.data_ptr() and len(first) == len(second)
        offsets = {part.storage_offset() for part in (first, second)}
        assert not offsets & addresses, "a new pool may lie where the old one was"
        addresses |= offsets


def test_reasons_are_one_line_and_name_no_folder():
    error = OSError("no module /home/me/.cache/x/mla.so or a/b here\nsecond line")
    assert measure.reason(error) == "OSError: no module mla.so or a/b here"
    assert measure.reason(KeyError()) == "KeyError"
    assert len(measure.reason(ValueError("x" * 999))) < 250


def test_another_backend_gives_no_loads_only_time(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_flashinfer.Wrapper, "auto_is_fa3", True)
    native, auto = run(tmp_path / "r.json", variants="native,auto")["rows"]
    assert (native["loads_only_us"], auto["loads_only_us"]) == (8.0, None)
    assert "auto took another backend" in auto["unavailable"]["loads only"]


def test_the_wrapper_of_flashinfer_0_6(tmp_path, monkeypatch):
    for name, module in fake_flashinfer.packages(flat=True).items():
        monkeypatch.setitem(sys.modules, name, module)
    (record,) = run(tmp_path / "r.json", baselines=None)["rows"]
    assert 1e-4 < record["rel_err"] < 3e-3
    assert {"cast+fa2", "fa2-bf16", "fa3-bf16"} <= set(record["baselines"])
    assert record["unavailable"]["fa3-fp8"] == (
        "Unavailable: upstream has no FP8 KV for MLA in this release"
    )
