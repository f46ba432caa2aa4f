"""build.sh as a user calls it."""

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from mla_fp8kv_build import cli, env
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
BUILD_SH = ROOT / "build.sh"


def run(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(BUILD_SH), *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_python_too_old(tmp_path):
    old = script(tmp_path / "python3", '[ "$1" = --version ] && echo Python 3.8.18; exit 1')
    result = run(MLA_FP8KV_PYTHON=old)
    assert result.returncode == 1
    assert result.stderr == (
        "error: Python 3.10 or newer with its venv module is needed; found Python 3.8.18.\n"
    )


def test_no_python(tmp_path):
    result = run(MLA_FP8KV_PYTHON=str(tmp_path / "absent"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: Python 3.10 or newer with its venv module is needed;")
    assert result.stderr.count("\n") == 1


def test_no_network_for_the_environment(tmp_path):
    result = run(MLA_FP8KV_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert result.returncode == 1
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("error: The build environment could not be made: No matching")
    assert "PIP_FIND_LINKS" in sentence and result.stdout == ""


def test_an_unfinished_environment_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_FP8KV_CACHE", str(tmp_path))
    requirements = env.ROOT / "tests" / "build" / "requirements-empty.txt"
    monkeypatch.setitem(env.REQUIREMENTS, "build", requirements)
    python = env.ensure("build")
    (python.parents[1] / "complete").unlink()
    python.unlink()
    assert env.ensure("build") == python and python.exists()
    before = python.lstat().st_mtime_ns
    assert env.ensure("build") == python and python.lstat().st_mtime_ns == before


def test_unknown_commands_and_options():
    assert run("whel").returncode == 2
    result = run("resources", "--arhc", "90a")
    assert result.returncode == 2 and "does not know --arhc" in result.stderr


def test_unknown_base():
    result = run("--base", "0.0.1")
    assert result.returncode == 1
    assert result.stderr == (
        f"error: FlashInfer 0.0.1 has no PIN file; supported are {', '.join(pins.supported())}.\n"
    )


def test_unknown_architecture(capsys):
    assert cli.main(["bundle", "--arch", "75"]) == 1
    assert capsys.readouterr().err.startswith("error: Architecture 75 is not supported; supported")


@pytest.mark.skipif("MLA_FP8KV_WHEEL" not in os.environ, reason="needs the wheel to be built")
def test_a_second_run_takes_seconds():
    start = time.monotonic()
    result = run("--base", os.environ["MLA_FP8KV_BASE"])
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 10
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["patch", "wheel", "total"]
    assert lines[3] == os.environ["MLA_FP8KV_WHEEL"]
    assert lines[4].startswith("install with: python3 -m pip install ")
    assert len(lines) == 5


def test_supported_pins_are_whole():
    for version in pins.supported():
        pin = pins.load(version)
        assert pin.version == version and len(pin.sha256) == 64 and pin.licence == "Apache-2.0"
        assert pin.sdist == f"flashinfer_python-{version}.tar.gz"


def test_a_pin_file_with_a_missing_field(release):
    path = pins.PINS / "9.9.9.toml"
    path.write_text('name = "flashinfer-python"\n')
    with pytest.raises(BuildError, match="9.9.9.toml is not a valid PIN file"):
        pins.load("9.9.9")
