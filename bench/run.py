"""Measures our kernel and its baselines in one run: python bench/run.py [--help].

Needs a GPU, torch and the patched flashinfer. Prints tables and writes bench/results/<gpu>.json,
or <gpu>.partial.json (which git ignores) where only a part was asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mla_bench import results
from mla_bench.rows import (
    BUILD_VARIABLES,
    PLAN_VARIABLES,
    QUICK_ROWS,
    ROWS,
    VARIANTS,
    extra_variant,
    select,
)

RESULTS = Path(__file__).resolve().parent / "results"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="rows or groups of rows (core, serving), comma-separated")
    parser.add_argument("--variants", help="variants of our kernel, comma-separated")
    parser.add_argument(
        "--extra", action="append", default=[], help="a further variant, NAME:VARIABLE=VALUE[,...]"
    )
    parser.add_argument("--baselines", help="baselines, comma-separated, or none")
    parser.add_argument("--quick", action="store_true", help=f"rows {', '.join(QUICK_ROWS)}")
    parser.add_argument("--no-host", action="store_true", help="leave out the costs on the host")
    parser.add_argument("--out", type=Path, help="result file instead of bench/results/<gpu>.json")
    parser.add_argument("--list", action="store_true", help="print what can be selected")
    options = parser.parse_args(argv)
    if options.quick and options.rows:
        parser.error("--quick selects its own rows: give --quick or --rows.")
    return options


def print_tables(result: dict) -> None:
    """The run for a reader of the terminal; what was missed comes last."""
    gpu, copy = result["machine"]["gpu"], result["copy_gbps"]
    print(f"\n{gpu}, copy {copy:.0f} GB/s, run {result['run_id']}")
    print(f"\n{results.variants_table(result)}\n\n{results.text_table(result)}\n")
    for line in results.feeding(result) + results.host_lines(result):
        print(line)
    for what, reason in results.not_measured(result).items():
        print(f"not measured: {what}: {reason}")
    verdicts = results.verdicts(result)
    missed = [line for line in verdicts if "MISSED" in line]
    print("\n".join([*missed, f"{len(verdicts) - len(missed)} of {len(verdicts)} bounds met"]))


def without_out(argv: list[str]) -> list[str]:
    """The arguments as a result may keep them: where it was written is of that machine only."""
    kept, skip = [], False
    for argument in argv:
        if not skip and not argument.startswith("--out="):
            skip = argument == "--out"
            kept += [] if skip else [argument]
        else:
            skip = False
    return kept


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    import torch  # after the arguments: --help must not wait for it
    from mla_bench import machine
    from mla_bench.contenders import BASELINES
    from mla_bench.measure import Run

    if options.list:
        print("rows:", *(row.name for row in ROWS), sep="\n  ")
        print("variants:", *(f"{v.name:16} {v.note}" for v in VARIANTS), sep="\n  ")
        print("baselines:", *(b.name for b in BASELINES), sep="\n  ")
        return 0
    try:
        rows = select(ROWS, ",".join(QUICK_ROWS) if options.quick else options.rows, "row")
        variants = select(VARIANTS, options.variants, "variant")
        variants += tuple(map(extra_variant, options.extra))
        baselines = select(BASELINES, options.baselines, "baseline")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    given = [name for name in BUILD_VARIABLES + PLAN_VARIABLES if name in os.environ]
    if given:
        print(f"bench: unset {', '.join(given)}: variants set them.", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench: a GPU is needed, torch finds none.", file=sys.stderr)
        return 2

    run = Run(without_out(argv))
    partial = (rows, variants, baselines) != (ROWS, VARIANTS, BASELINES) or options.no_host
    gpu = machine.slug(run.result["machine"]["gpu"])
    path = options.out or RESULTS / f"{gpu}{'.partial' if partial else ''}.json"
    run.measure(rows, variants, baselines, not options.no_host, path)
    print_tables(run.result)
    print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
