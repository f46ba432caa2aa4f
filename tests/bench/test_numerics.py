"""The numerics note: its roundings, its unusual caches and its table. Needs no GPU."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the note's computations need torch")
import numerics  # noqa: E402
from numerics import BATCH, CKV, HEADS, LOGITS, ROUNDINGS, make_problem, normal  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured():
    """Errors of every rounding for 512 tokens, by logits."""
    found = {}
    for logits in LOGITS:
        problem = make_problem(512, CPU, normal)
        numerics.set_logits(problem, logits)
        found[logits] = numerics.measure(problem, ROUNDINGS)
    return found


def test_exact_attention_is_torchs():
    problem = make_problem(100, CPU, normal)
    for request, out in enumerate(numerics.attend(problem)):
        keys = problem.keys(request)
        expected = torch.nn.functional.scaled_dot_product_attention(
            problem.q[request].double()[None, :, None],
            keys.expand(1, HEADS, -1, -1),
            keys[:, :CKV].expand(1, HEADS, -1, -1),
            scale=problem.sm_scale,
        )
        torch.testing.assert_close(out, expected[0, :, 0])


def test_logits_are_what_they_are_called():
    for logits, value in (("std 1", 1.0), ("std 10", 10.0)):
        problem = make_problem(512, CPU, normal)
        numerics.set_logits(problem, logits)
        assert float(problem.scores(0).std()) == pytest.approx(value)
    numerics.set_logits(problem, "up to 1e4")
    scores = torch.stack([problem.scores(request) for request in range(BATCH)])
    assert float(scores.abs().max()) == pytest.approx(1e4)
    assert scores.min() < -5e3 and scores.max() > 5e3


def test_a_path_without_rounding_has_no_error():
    problem = make_problem(512, CPU, normal)
    paths = {"same": lambda problem, _: numerics.attend(problem)}
    assert numerics.measure(problem, paths)["same"] == {"relative": 0.0, "worst_row": 0.0}


def test_roundings_have_the_size_that_their_mantissas_say(measured):
    """A rounding to n bits has a root mean square of 0.42 x 2^-n; errors of P average out."""
    errors = {name: found["relative"] for name, found in measured["std 1"].items()}
    assert errors["output in BF16"] == pytest.approx(0.42 * 2**-8, rel=0.05)
    assert errors["P in BF16"] == pytest.approx(8 * errors["P in FP16"], rel=0.2)
    assert errors["P in e4m3, up to 448"] == pytest.approx(16 * errors["P in BF16"], rel=0.3)
    assert errors["P in FP16"] < 0.15 * errors["output in BF16"]
    for low in ("query in e4m3", "P in e4m3, up to 1", "P in e4m3, up to 448"):
        assert errors[low] > 8 * errors["output in BF16"]


def test_the_query_in_fp8_gets_worse_with_the_logits(measured):
    small, large = (measured[logits]["query in e4m3"] for logits in ("std 1", "std 10"))
    assert large["relative"] > 2 * small["relative"]
    assert all(found["worst_row"] >= found["relative"] for found in (small, large))


def test_unusual_caches_are_what_they_are_called():
    nans = {case["what"]: case["exact"]["nan"] for case in numerics.look_at_unusual(CPU, {})}
    row = HEADS * CKV
    infinite = nans.pop("e5m2, +inf in a slot of request 1")
    assert HEADS < infinite < row, "rows with a score of +inf, and one dim of the others"
    assert nans == {
        "every value +-448": 0,
        "every value subnormal": 0,
        "NaN in a slot not referenced": 0,
        "NaN in a slot of request 1": row,
        "e5m2, NaN in a slot of request 1": row,
    }
    pools = {name: problem.pool.float() for name, problem in numerics.unusual(CPU).items()}
    assert pools["every value +-448"].abs().unique().tolist() == [448.0]
    codes = [code * 2.0**-9 for code in range(1, 8)]
    assert pools["every value subnormal"].abs().unique().tolist() == codes
    assert int(pools["NaN in a slot not referenced"].isnan().sum()) == 1


@pytest.fixture
def result(measured):
    facts = {key: "?" for key in ("gpu", "driver", "cuda", "torch", "commit", "date")}
    return {
        "machine": facts,
        "rows": [
            {"kv_len": 512, "logits": logits, "paths": paths} for logits, paths in measured.items()
        ],
        "unusual": numerics.look_at_unusual(CPU, {}),
    }


def test_the_table_goes_between_the_marks(result, tmp_path, monkeypatch):
    note, file = tmp_path / "numerics.md", tmp_path / "numerics-gpu.json"
    note.write_text(f"before\n{numerics.BEGIN}\nold\n{numerics.END}\nafter\n")
    file.write_text(json.dumps(result))
    monkeypatch.setattr(numerics, "NOTE", note)
    for _ in range(2):
        assert numerics.main(["--table", "--file", str(file)]) == 0
        lines = note.read_text().splitlines()
        assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
        assert sum(line.startswith("| 512 | ") for line in lines) == len(LOGITS)
        row = next(line for line in lines if line.startswith("| 512 | std 1 "))
        error = result["rows"][0]["paths"]["output in BF16"]["relative"]
        assert numerics.scientific(error) in row
    with pytest.raises(ValueError, match="must have the lines"):
        numerics.with_table("no marks", "text")


def test_the_note_has_the_marks():
    assert numerics.with_table(numerics.NOTE.read_text(), "x").count("\nx\n") == 1


@pytest.mark.parametrize(
    "value, text", [(0.0, "0"), (1.654e-3, "1.65e-3"), (0.1, "1.00e-1"), (2.0, "2.00e0")]
)
def test_scientific(value, text):
    assert numerics.scientific(value) == text


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert numerics.main([]) == 2
    assert capsys.readouterr().err == "numerics: a GPU is needed, torch finds none.\n"
