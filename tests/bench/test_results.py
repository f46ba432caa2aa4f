"""The form of result files, the refusal to compare runs, and the tables."""

import json

import compare
import pytest
import table
from mla_bench import results


def test_a_saved_result_loads_and_leaves_nothing_else(tmp_path, make_row, make_result):
    result = make_result(make_row())
    results.save(result, tmp_path / "new" / "gpu.json")
    assert results.load(tmp_path / "new" / "gpu.json") == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": 0.0}, "us must be positive"),
        ({"us": "50"}, "us must be"),
        ({"us": True}, "us must be"),
        ({"rel_err": None}, "rel_err must be"),
        ({"baselines": {"fa3-bf16": float("nan")}}, "baseline fa3-bf16 must be positive"),
        ({"speed": 1.0}, "unknown fields speed"),
    ],
)
def test_a_malformed_row_is_refused(make_row, make_result, change, message):
    with pytest.raises(results.InvalidResult, match=message):
        results.validate(make_result({**make_row(), **change}))


def test_a_missing_field_another_schema_or_a_row_twice_is_refused(make_row, make_result):
    row = make_row()
    del row["floor_us"]
    with pytest.raises(results.InvalidResult, match="lacks floor_us"):
        results.validate(make_result(row))
    with pytest.raises(results.InvalidResult, match="schema 1 is supported, got 2"):
        results.validate(make_result(schema=2))
    with pytest.raises(results.InvalidResult, match="is there twice"):
        results.validate(make_result(make_row(), make_row()))
    assert results.validate(make_result(make_row(), make_row(variant="bits")))


def test_an_invalid_result_does_not_replace_a_file(tmp_path, make_row, make_result):
    path = tmp_path / "gpu.json"
    results.save(make_result(make_row()), path)
    with pytest.raises(results.InvalidResult):
        results.save(make_result({**make_row(), "us": -1.0}), path)
    assert results.load(path)["rows"][0]["us"] == 50.0


def test_numbers_of_different_runs_are_not_compared(make_row, make_result):
    first, second = make_result(make_row()), make_result(make_row(us=25.0), run_id="second")
    with pytest.raises(results.DifferentRuns, match=r"different runs \(first and second\)"):
        results.compare(first, "native", second, "native")


def test_within_a_run_variants_and_baselines_are_compared(make_row, make_result):
    result = make_result(make_row(), make_row(variant="bits", us=60.0), make_row("other", us=5.0))
    assert results.compare(result, "native", result, "bits") == [("h8-b32-kv8192", 50, 60, 1.2)]
    assert results.compare(result, "native", result, "fa3-bf16")[1] == ("other", 5, 100, 20)
    with pytest.raises(ValueError, match="no 'fa2-bf16' in this run: it has bits, fa3-bf16, nat"):
        results.compare(result, "native", result, "fa2-bf16")


def test_compare_command(tmp_path, capsys, make_row, make_result):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    results.save(make_result(make_row()), a)
    results.save(make_result(make_row(), run_id="second"), b)
    assert compare.main([str(a), f"{a}:fa3-bf16"]) == 0
    assert "2.00x" in capsys.readouterr().out
    assert compare.main([str(a), str(b)]) == 1
    captured = capsys.readouterr()
    assert "different runs" in captured.err and "x" not in captured.out
    b.write_text(json.dumps({"rows": []}))
    assert compare.main([str(a), str(b)]) == 1
    assert "lacks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (841.7, "842"),
        (12.345, "12.3"),
        (4.5, "4.50"),
        (0.068, "0.0680"),
        (0.0016, "1.6e-03"),
        (3.5e-2, "0.0350"),
        (0.0, "0.0"),
    ],
)
def test_numbers_keep_three_digits(value, text):
    assert results.number(value) == text


def test_tables_name_each_peer_with_its_ratio(tmp_path, capsys, make_row, make_result):
    without = make_row("other", baselines={}, ratios={}, us=7.0)
    result = make_result(make_row(), without)
    text = results.text_table(result).splitlines()
    assert text[0].split()[-1] == "fa3-bf16"
    assert text[1].endswith("100 (2.00x)") and text[2].endswith("-")
    assert len({len(line) for line in text}) == 1
    results.save(result, tmp_path / "gpu.json")
    assert table.main([str(tmp_path / "gpu.json"), "--markdown"]) == 0
    markdown = capsys.readouterr().out.splitlines()
    assert markdown[1].startswith("| --- | ---: |")
    assert len({line.count("|") for line in markdown}) == 1


def test_variants_stand_beside_native_and_an_unchanged_plan_is_marked(make_row, make_result):
    result = make_result(
        make_row(),
        make_row(variant="bits", us=60.0),
        make_row(variant="smem100k-1cta", us=75.0, plan=[1, 0, 132]),
    )
    line = results.variants_table(result).splitlines()[1]
    assert "60.0 (1.20x=)" in line and "75.0 (1.50x)" in line


def test_verdicts_say_what_is_missed_and_by_how_much(make_row, make_result):
    result = make_result(
        make_row(us=42.0, loads_only_us=40.0),
        make_row(variant="smem100k-1cta", us=63.0),
        make_row(variant="mma", us=41.0),
        make_row(variant="bits", us=48.0),
    )
    lines = results.verdicts(result)
    assert lines == [
        "h8-b32-kv8192: 42.0 us (at most 42.0 us): met",
        "h8-b32-kv8192 against loads only: 1.05x (at most 1.08x): met",
        "h8-b32-kv8192 with the 100 KB tiles, one CTA an SM: 1.50x (at most 1.35x): MISSED by 11 %",
        "h8-b32-kv8192 with bit placement: 1.17x (at most 1.20x): met",
    ]
    # The bounds against loads and on 100 KB tiles are for up to 16 packed rows.
    many = make_result(make_row(heads=32), make_row(heads=32, variant="smem100k-1cta", us=99.0))
    assert len(results.verdicts(many)) == 1


def test_feeding_compares_one_cta_an_sm_with_real_parts(make_row, make_result):
    row = make_row(variant="smem100k-1cta", us=75.0)
    lines = results.feeding(make_result(row))
    assert "20.1 GB/s an SM" in lines[0]
    assert any("RTX PRO 6000" in line and "9.5 GB/s, 2.1x less" in line for line in lines)
    assert results.feeding(make_result(make_row())) == []


def test_host_costs_and_gaps_are_told(make_row, make_result):
    host = {
        "plan_us": [
            {"batch": 1, "heads": 16, "ours": 20.0, "upstream": 30.0},
            {"batch": 256, "heads": 16, "ours": 90.0, "upstream": 80.0},
        ],
        "run_us": {"ours": 11.0, "upstream": 12.0},
    }
    lines = results.host_lines(make_result(host=host))
    assert lines[0] == "run() on the host: 11.0 us, upstream 12.0 us"
    assert [line.rsplit(" ", 1)[1] for line in lines[1:]] == ["met", "MISSED"]

    everywhere, once = {"flashmla": "not installed"}, {"flashmla": "not installed", "x": "too big"}
    result = make_result(make_row(unavailable=everywhere), make_row("other", unavailable=once))
    assert results.not_measured(result) == {"flashmla": "not installed", "other x": "too big"}
