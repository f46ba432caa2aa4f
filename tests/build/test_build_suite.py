"""`./build.sh test` runs what it says, says what it skipped, and fails when it should."""

import sys
from pathlib import Path

import pytest
from invented import write
from mla_fp8kv_build import cli, env, site, suite, wheel
from mla_fp8kv_build import pin as pins

GPU_TESTS = """\
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_gpu(n):
    pytest.skip("no CUDA GPU on this machine")

@pytest.mark.gpu
@pytest.mark.skip(reason="older than compute capability 8.0")
def test_old():
    pass

@pytest.mark.skip(reason="not about GPUs")
def test_other():
    pass

def test_passes():
    import os
    assert os.environ["MLA_FP8KV_WHEEL"].endswith(".whl") and os.environ["MLA_FP8KV_BASE"]
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose wheel is built and whose environments are the one that runs this test."""
    asked = []
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(suite, "SGLANG", tmp_path / "tests" / "sglang")
    monkeypatch.setattr(suite, "MUTATIONS", tmp_path / "tests" / "host" / "mutations.py")
    monkeypatch.setattr(suite, "BUILD", tmp_path / "build")
    monkeypatch.setattr(wheel, "build", lambda pin, steps: tmp_path / "a.whl")
    monkeypatch.setattr(site, "unpacked", lambda pin, built: tmp_path / "site")
    monkeypatch.setattr(env, "ensure", lambda name: asked.append(name) or Path(sys.executable))
    # The plug-in that reports comes from the real checkout.
    (tmp_path / "python").symlink_to(Path(__file__).resolve().parents[2] / "python")
    write(tmp_path / "pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["gpu: a GPU"]\n')
    write(tmp_path / "tests" / "test_all.py", GPU_TESTS)
    write(tmp_path / "tests" / "sglang" / "test_plugin.py", "def test_plugin():\n    pass\n")
    return asked


def test_the_end_says_how_many_gpu_tests_were_skipped_and_why(checkout, capfd):
    assert cli.main(["test"]) == 0
    out = capfd.readouterr().out
    assert "3 GPU tests skipped: no CUDA GPU on this machine\n" in out
    assert "1 GPU tests skipped: older than compute capability 8.0\n" in out
    assert "1 passed, 5 skipped" in out.splitlines()[-1], "pytest's own line comes last"
    assert checkout == ["dev"], "the tests of SGLang need an environment of their own"


def test_pytest_arguments_are_handed_on(checkout, capfd):
    assert cli.main(["test", "-k", "passes", "-q"]) == 0
    assert "1 passed, 5 deselected" in capfd.readouterr().out


def test_sglang_runs_in_its_environment(checkout, capfd):
    assert cli.main(["test", "--sglang"]) == 0
    assert "1 passed" in capfd.readouterr().out and checkout == ["sglang"]


def test_a_failing_test_fails(checkout, tmp_path):
    write(tmp_path / "tests" / "test_bad.py", "def test_bad():\n    assert False\n")
    assert cli.main(["test", "-q"]) == 1


def test_no_test_is_a_failure_of_its_own(checkout, capfd):
    assert cli.main(["test", "-k", "nothing_is_called_so"]) == 1
    assert "error: pytest found no test for -k nothing_is_called_so" in capfd.readouterr().err


def test_mutations(checkout, tmp_path, capfd):
    assert cli.main(["test", "--mutations"]) == 1
    assert capfd.readouterr().err == "error: This checkout has no tests/host/mutations.py.\n"
    write(tmp_path / "tests" / "host" / "mutations.py", "import sys\nsys.exit(len(sys.argv) - 1)\n")
    assert cli.main(["test", "--mutations"]) == 0
    assert cli.main(["test", "--mutations", "one", "two", "three"]) == 3


def test_bench(checkout, tmp_path, monkeypatch):
    write(tmp_path / "bench" / "run.py", "import sys\nsys.exit(sys.argv[1:] != ['--quick'])\n")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert cli.main(["bench", "--quick"]) == 0


def test_another_base_runs_what_depends_on_it(checkout, tmp_path, monkeypatch, capfd):
    (other, *_) = (version for version in pins.supported() if version != pins.DEFAULT_BASE)
    write(tmp_path / "tests" / "hooks" / "test_hooks.py", "def test_hooks():\n    pass\n")
    monkeypatch.setattr(suite, "ON_EVERY_BASE", (tmp_path / "tests" / "hooks",))
    assert cli.main(["--base", other, "test"]) == 0
    assert "1 passed in" in capfd.readouterr().out
    assert cli.main(["test"]) == 0
    assert "2 passed, 5 skipped" in capfd.readouterr().out


def test_what_depends_on_the_base_exists():
    assert all(path.exists() for path in suite.ON_EVERY_BASE)
