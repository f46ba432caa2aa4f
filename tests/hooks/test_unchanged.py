"""What the patches must not change: every other file, every cache key, every BF16/FP16 call."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import mla_fp8kv
import pytest
from flashinfer_base import FLAT

PROBE = Path(__file__).with_name("probe.py")


def files(tree):
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_only_the_wrapper_differs(trees):
    pristine, patched = files(trees.pristine), files(trees.patched)
    assert len(pristine) > 100
    changed = {name for name in pristine | patched if pristine.get(name) != patched.get(name)}
    wrapper = "flashinfer/mla.py" if FLAT else "flashinfer/mla/_batch_mla/_wrapper.py"
    assert changed == {wrapper}


@pytest.fixture(scope="module")
def answers(trees, tmp_path_factory):
    """What the probe says about each tree; the repository's package is only in the patched one."""
    found = {}
    for name in ("pristine", "patched"):
        path = [str(getattr(trees, name))]
        if name == "patched":
            path.append(str(Path(mla_fp8kv.__file__).resolve().parents[1]))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path_factory.mktemp("workspace")),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        }
        result = subprocess.run(
            [sys.executable, str(PROBE)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[name] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("topic", ["uris", "specs", "calls"] + ["refusals"] * (not FLAT))
def test_same_answers(answers, topic):
    pristine, patched = answers["pristine"][topic], answers["patched"][topic]
    assert len(pristine) >= 4
    assert pristine == patched


def test_16_bit_plans_import_nothing_of_ours(answers):
    assert answers["patched"]["imported"] == []


def test_the_probe_sees_a_difference(answers):
    """Specs and calls of different inputs differ, so equal answers mean something."""
    for topic in ("uris", "specs", "calls"):
        values = [json.dumps(value) for value in answers["pristine"][topic].values()]
        # "auto" and the backend it names give the same call.
        assert len(set(values)) >= (len(values) // 2 if topic == "calls" else len(values))
