"""Prints the table of a result file: python bench/table.py FILE [VARIANT] [--markdown]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mla_bench import results
from mla_bench.rows import NATIVE


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("variant", nargs="?", default=NATIVE)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(argv)
    form = results.markdown_table if options.markdown else results.text_table
    print(form(results.load(options.file), options.variant))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
