"""Runs one row of one variant once under a profiler: python bench/profile_one.py ROW [VARIANT].

    ncu --profile-from-start off --clock-control none --set full -k regex:mla -f -o OUT \\
        python bench/profile_one.py h8-b32-kv8192

Only the last layer is inside the profiled range, after warm-up on other pools. VARIANT may also be
the name of a baseline.
"""

from __future__ import annotations

import sys

from mla_bench.rows import NATIVE, ROWS, VARIANTS, select


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    import torch
    from mla_bench.case import Case, Pools
    from mla_bench.contenders import BASELINES, ours

    name = argv[1] if len(argv) == 2 else NATIVE
    try:
        (row,) = select(ROWS, argv[0], "row")
        (contender,) = select((*VARIANTS, *BASELINES), name, "variant or baseline")
    except ValueError as error:
        print(f"profile_one: {error}", file=sys.stderr)
        return 2
    case = Case(row, Pools(row.kv_dtype))
    prepared = ours(case, contender) if contender in VARIANTS else contender.prepare(case)
    for layer in (1, 2, 3):
        prepared.run_layer(layer)
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        prepared.run_layer(0)
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
