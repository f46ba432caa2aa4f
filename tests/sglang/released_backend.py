"""Runs a text of SGLang 0.5.9's backend file in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

BACKEND = "sglang/srt/layers/attention/flashinfer_mla_backend.py"


def run(tree: Path, text: str, *words: str) -> dict:
    """What run_0_5_9.py says about the text, which is put into the folder `tree`."""
    file = tree / BACKEND
    file.parent.mkdir(parents=True)
    file.write_text(text)
    for folder in file.relative_to(tree).parents[:-1]:
        (tree / folder / "__init__.py").touch()
    script = Path(__file__).with_name("run_0_5_9.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tree), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
