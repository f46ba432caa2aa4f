"""What `bench/pack_sglang.py` packs is enough to run the backend where SGLang is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang", reason="needs the sglang environment: ./build.sh test --sglang")

import steps  # noqa: E402
from mla_fp8kv import installed  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]


def test_packed_sglang_runs_every_step(tmp_path):
    pack = [sys.executable, str(REPOSITORY / "bench" / "pack_sglang.py")]
    subprocess.run([*pack, str(installed.package_dir("sglang")), "-o", str(tmp_path)], check=True)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.py")) < 2 << 20
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("run_slim.py")), tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == list(steps.ALL)
