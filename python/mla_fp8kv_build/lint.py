"""Format and lint of our sources, and the rules of the patch series."""

import subprocess
from pathlib import Path

from mla_fp8kv_build import env, files, series
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.paths import ROOT

_CXX = {".cu", ".cuh", ".h", ".cpp"}
_FOLDERS = ("python", "tests", "bench")


def sources() -> list[Path]:
    """C++ and CUDA files of ours."""
    return [
        path
        for folder in _FOLDERS
        for path in files.source_files(ROOT / folder)
        if path.suffix in _CXX
    ]


def lint(bases: list[pins.Pin], fix: bool) -> int:
    """Print what is wrong and return 1, or return 0; with `fix`, correct what tools can."""
    tools = env.ensure("dev").parent
    ruff, clang_format = str(tools / "ruff"), str(tools / "clang-format")
    check, style, layout = (
        (["--fix"], [], ["-i"]) if fix else ([], ["--check"], ["--dry-run", "-Werror"])
    )
    commands = {
        "ruff check": [ruff, "check", "--quiet", *check, *_FOLDERS],
        "ruff format": [ruff, "format", "--quiet", *style, *_FOLDERS],
        "clang-format": [clang_format, *layout, *map(str, sources())],
        "bash -n": ["bash", "-n", "build.sh"],
    }
    failed = False
    for name, command in commands.items():
        bad = subprocess.run(command, cwd=ROOT, check=False).returncode != 0
        print(f"  {name:<14} {'FAILED' if bad else 'ok'}", flush=True)
        failed |= bad
    for pin in bases:
        problems = series.lint(pin)
        print(f"  {'patches ' + pin.version:<14} {'FAILED' if problems else 'ok'}")
        for problem in problems:
            print(f"    {problem}")
        failed |= bool(problems)
    return int(failed)
