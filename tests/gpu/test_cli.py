"""A user's first two commands on a GPU, as they type them."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def answer(command: str, seconds: int) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mla_fp8kv", command]
    return subprocess.run(line, capture_output=True, text=True, timeout=seconds, check=False)


def test_doctor():
    result = answer("doctor", 60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mlafp8" in result.stdout


def test_verify():
    """Under a minute, as promised, where the module need not be compiled first."""
    result = answer("verify", 60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASS" in result.stdout.splitlines()
