"""Runs the tests, each set in the environment it needs, on the built wheel."""

import os
import subprocess
from pathlib import Path

from mla_fp8kv_build import env, site, wheel
from mla_fp8kv_build.errors import BuildError
from mla_fp8kv_build.paths import BUILD, ROOT
from mla_fp8kv_build.pin import DEFAULT_BASE, Pin
from mla_fp8kv_build.steps import Steps

TESTS = ROOT / "tests"
SGLANG = TESTS / "sglang"
MUTATIONS = TESTS / "host" / "mutations.py"
# What another base than the default can break; the rest is the same on all of them.
ON_EVERY_BASE = tuple(
    TESTS / name
    for name in (
        *("build/test_build_wheel.py", "build/test_build_bundle.py"),
        *("hooks", "cli", "gpu", "sglang/test_0_5_9.py"),
    )
)
_NO_TESTS = 5  # pytest's exit status


def environment(pin: Pin, built: Path, unpacked: Path) -> dict[str, str]:
    """Variables under which tests and tools see the built wheel, then the checkout's driver."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(unpacked), str(ROOT / "python")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MLA_FP8KV_BASE": pin.version,
        "MLA_FP8KV_WHEEL": str(built),
        # FlashInfer writes a log and compiled modules here on import.
        "FLASHINFER_WORKSPACE_BASE": str(BUILD / f"workspace-{pin.version}"),
    }


def run_python(pin: Pin, name: str, arguments: list[str], steps: Steps) -> int:
    """Exit status of `python ARGUMENTS` in the named environment, with the wheel importable."""
    built = wheel.build(pin, steps)
    # First, because making one takes minutes, in which other builds may outdate an unpacked wheel.
    with steps.step("env") as notes:
        python = env.ensure(name)
        notes.append(name)
    with steps.step("site"):
        unpacked = site.unpacked(pin, built)
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, env=environment(pin, built, unpacked), check=False
    ).returncode


def test(pin: Pin, arguments: list[str]) -> int:
    """The tests that `arguments`, which go to pytest, name.

    Without any, all that the dev environment can run; on another base than the default, those that
    depend on it.
    """
    if not any(Path(word.split("::")[0]).exists() for word in arguments):
        if pin.version == DEFAULT_BASE:
            arguments = [*arguments, str(TESTS), f"--ignore={SGLANG}"]
        else:
            arguments = [*arguments, *map(str, ON_EVERY_BASE)]
    return _pytest(pin, "dev", arguments)


def test_sglang(pin: Pin, arguments: list[str]) -> int:
    """The plug-in on the real SGLang package, in an environment of 11 GB."""
    _need(SGLANG)
    return _pytest(pin, "sglang", [*arguments, str(SGLANG)])


def test_mutations(pin: Pin, arguments: list[str]) -> int:
    """One-line faults put into the kernel, each of which the host tests must find."""
    _need(MUTATIONS)
    return run_python(pin, "dev", [str(MUTATIONS), *arguments], Steps())


def _pytest(pin: Pin, name: str, arguments: list[str]) -> int:
    plugin = ["-p", "mla_fp8kv_build.gpu_report"]
    status = run_python(pin, name, ["-m", "pytest", *plugin, *arguments], Steps())
    if status == _NO_TESTS:
        raise BuildError(f"pytest found no test for {' '.join(arguments)}.")
    return status


def _need(path: Path) -> None:
    if not path.exists():
        raise BuildError(f"This checkout has no {path.relative_to(ROOT)}.")
