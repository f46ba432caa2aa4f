"""Compares two things of one run: python bench/compare.py A.json:native A.json:fa3-bf16.

Each side is FILE[:NAME], NAME being a variant of ours (default: native) or a baseline. Numbers of
different runs are refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mla_bench import results
from mla_bench.rows import NATIVE


def side(text: str) -> tuple[dict, str]:
    """(result, name) of a FILE[:NAME] argument."""
    file, _, name = text.partition(":")
    return results.load(Path(file)), name or NATIVE


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        (first, what), (second, against) = side(argv[0]), side(argv[1])
        compared = results.compare(first, what, second, against)
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(f"{'row':26} {what:>18} {against:>18}   {against} / {what}")
    for name, ours, theirs, ratio in compared:
        print(f"{name:26} {results.number(ours):>18} {results.number(theirs):>18}   {ratio:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
