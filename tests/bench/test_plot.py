"""The plots, drawn from invented numbers into a temporary folder."""

import pytest

pytest.importorskip("matplotlib", reason="the plots need matplotlib")

import plot  # noqa: E402
from mla_bench import results  # noqa: E402


def test_both_plots_are_written_beside_the_result(tmp_path, make_row, make_result):
    rows = [make_row(), make_row("h16-b1-kv500", heads=16, batch=1, kv_len=500, floor_us=0.1)]
    results.save(make_result(*rows, make_row(variant="bits")), tmp_path / "gpu.json")
    assert plot.main([str(tmp_path / "gpu.json")]) == 0
    bars = (tmp_path / "gpu-bars.svg").read_text()
    roofline = (tmp_path / "gpu-roofline.svg").read_text()
    # Text is drawn as outlines, with the text itself in a comment.
    assert "<!-- 8 heads, 32 x 8,192 -->" in bars and "<!-- FA3, BF16 pool -->" in bars
    assert bars.count("<!-- 50.0 -->") == 2, "one bar a native row, none for other variants"
    assert "Invented GPU" in bars and "Invented GPU" in roofline
    assert plot.main([str(tmp_path / "gpu.json")]) == 0
    assert (tmp_path / "gpu-bars.svg").read_text() == bars, "the same input gives the same file"


def test_only_core_rows_can_be_drawn(tmp_path, capsys, make_row, make_result):
    path = tmp_path / "gpu.json"
    results.save(make_result(make_row(group="serving")), path)
    assert plot.main([str(path)]) == 1
    assert "no core rows" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.json"]


def test_labels_are_moved_apart_and_never_below_their_point():
    assert plot.spread_out([10.0, 11.0, 40.0], 1.5) == [10.0, 15.0, 40.0]
