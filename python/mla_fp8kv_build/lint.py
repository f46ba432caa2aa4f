"""Format and lint of our sources, and the rules of the patch series."""

import re
import subprocess
from pathlib import Path

from mla_fp8kv_build import env, files, series
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.paths import ROOT

_CXX = {".cu", ".cuh", ".h", ".cpp"}
_FOLDERS = ("python", "tests", "bench")


def cxx_sources() -> list[str]:
    """C++ and CUDA files of ours, relative to the checkout."""
    return [
        str(path.relative_to(ROOT))
        for folder in _FOLDERS
        for path in files.source_files(ROOT / folder)
        if path.suffix in _CXX
    ]


def lint(bases: list[pins.Pin], fix: bool) -> int:
    """Print what is wrong and return 1, or return 0; with `fix`, first correct what tools can."""
    tools = env.ensure("dev").parent
    ruff, clang_format = str(tools / "ruff"), str(tools / "clang-format")
    if fix:
        _run([ruff, "check", "--quiet", "--fix", *_FOLDERS])
        _run([ruff, "format", "--quiet", *_FOLDERS])
        _run([clang_format, "-i", *cxx_sources()])
    concise = "--output-format=concise"
    results = {
        "ruff check": _run([ruff, "check", "--quiet", concise, *_FOLDERS]),
        "ruff format": _run([ruff, "format", "--check", "--quiet", concise, *_FOLDERS]),
        "clang-format": _unformatted(_run([clang_format, "--dry-run", *cxx_sources()])),
        "bash -n": _run(["bash", "-n", "build.sh"]) + _run(["bash", "-n", ".ci/run"]),
    }
    results |= {f"patches {pin.version}": series.lint(pin) for pin in bases}
    for name, problems in results.items():
        print(f"  {name:<14} {f'{len(problems)} problems' if problems else 'ok'}")
        for problem in problems:
            print(f"    {problem}")
    return int(any(results.values()))


def _run(command: list[str]) -> list[str]:
    """The lines a tool prints; a failure that prints nothing is a line, too."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = result.stdout.splitlines()
    if result.returncode and not lines:
        return [f"{Path(command[0]).name} failed with exit status {result.returncode}"]
    return lines


def _unformatted(lines: list[str]) -> list[str]:
    """clang-format's warnings, one line a file; what is no such warning stays as it is."""
    warning = re.compile(r"(.+?):(\d+):\d+: warning: code should be clang-formatted")
    places: dict[str, str] = {}
    for match in filter(None, map(warning.match, lines)):
        places.setdefault(match.group(1), match.group(2))
    if lines and not places:
        return lines
    return [f"{name}: unformatted from line {line} on" for name, line in places.items()]
