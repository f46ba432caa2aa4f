"""`./build.sh lint` sees each kind of fault, and `--fix` corrects what tools can."""

import shutil
from pathlib import Path

import pytest
from invented import write
from mla_fp8kv_build import lint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A checkout without faults."""
    for name in ("pyproject.toml", ".clang-format"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    write(tmp_path / "python" / "a.py", "x = 1\n")
    write(tmp_path / "python" / "a.cuh", "int f(int a, int b);\n")
    write(tmp_path / "tests" / "b.py", "y = 1\n")
    write(tmp_path / "bench" / "c.py", "z = 1\n")
    write(tmp_path / "build.sh", "true\n")
    write(tmp_path / ".ci" / "run", "true\n")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    return tmp_path


def test_a_clean_tree(tree, capsys):
    assert lint.lint([], fix=False) == 0
    assert capsys.readouterr().out.count(" ok\n") == 4


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("python/a.py", "import os\n", "python/a.py:1:8: F401"),
        ("bench/c.py", f"z = '{'x' * 100}'\n", "bench/c.py:1:101: E501"),
        ("tests/b.py", "y  =  1\n", "tests/b.py:1:3: unformatted"),
        ("python/a.cuh", "int f(int a,\n      int b);\n", "python/a.cuh: unformatted from line 1"),
        ("build.sh", "if\n", "build.sh: line 2: syntax error"),
        (".ci/run", "if\n", ".ci/run: line 2: syntax error"),
    ],
)
def test_a_fault_is_named(tree, capsys, name, text, line):
    write(tree / name, text)
    assert lint.lint([], fix=False) == 1
    assert line in capsys.readouterr().out


def test_fix(tree, capsys):
    write(tree / "tests" / "b.py", "import os\ny  =  1\n")
    write(tree / "python" / "a.cuh", "int f(int a,\n      int b);\n")
    assert lint.lint([], fix=True) == 0
    assert (tree / "tests" / "b.py").read_text() == "y = 1\n"
    assert (tree / "python" / "a.cuh").read_text() == "int f(int a, int b);\n"
