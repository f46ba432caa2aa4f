"""The command line of the harness, as far as it goes without a GPU."""

import pytest
import run


def test_the_output_path_is_not_kept_in_the_result():
    argv = ["--rows", "core", "--out", "/somewhere/x.json", "--quick", "--out=/y.json", "--no-host"]
    assert run.without_out(argv) == ["--rows", "core", "--quick", "--no-host"]


def test_quick_and_rows_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        run.parse_arguments(["--quick", "--rows", "core"])
    assert "--quick or --rows" in capsys.readouterr().err


def test_unknown_names_and_a_missing_gpu_are_one_sentence(capsys, monkeypatch):
    torch = pytest.importorskip("torch", reason="the harness needs torch")
    assert run.main(["--variants", "fast"]) == 2
    assert "unknown variant fast: known are" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert capsys.readouterr().err == "bench: a GPU is needed, torch finds none.\n"


def test_list_names_rows_variants_and_baselines(capsys):
    pytest.importorskip("torch", reason="the harness needs torch")
    assert run.main(["--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert {"h8-b32-kv8192", "smem100k-1cta", "cast+fa3"} <= set(listed)


def test_variables_of_variants_must_not_be_set_outside(capsys, monkeypatch):
    pytest.importorskip("torch", reason="the harness needs torch")
    monkeypatch.setenv("MLA_FP8KV_CACHE", "abc")
    monkeypatch.setenv("MLA_FP8KV_DEQUANT", "bits")
    assert run.main([]) == 2
    assert capsys.readouterr().err == "bench: unset MLA_FP8KV_DEQUANT: variants set them.\n"
