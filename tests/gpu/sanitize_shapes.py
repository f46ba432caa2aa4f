"""Runs every kernel variant once on small shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python tests/gpu/sanitize_shapes.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize_shapes.py

Each result is compared with float64 as well, and the script fails if a variant was not reached.
"""

import os
import sys

from mla_cases import Case, compare, make_inputs, new_wrapper, plan, reference, run_planned

TILE_ROWS = (8, 16, 32, 64)
SHAPES = {
    "split, page size 3, an empty request": Case((1, 2, 1), (700, 65, 0), 8, 3),
    "not split, causal": Case((5, 3), (64, 2), 12, causal=True),
    "group scales, split": Case((1, 2), (700, 65), 8, group_scales=True, lse="basee"),
    "group scales, not split": Case((2,), (33,), 8, 16, group_scales=True),
    "fp16 query": Case((1, 2), (130, 65), 8, q="fp16", lse=None),
}


def variants():
    """(format, head_dim_kpe) of every module; MLA_FP8KV_SANITIZE=e4m3_64 keeps one."""
    only = os.environ.get("MLA_FP8KV_SANITIZE")
    every = [(kv, kpe) for kv in ("e4m3", "e5m2") for kpe in (64, 0)]
    return [(kv, kpe) for kv, kpe in every if only in (None, f"{kv}_{kpe}")]


def run_shape(case: Case, rows: int) -> tuple[int, list[str]]:
    """Run one case with the tile of `rows` rows: the tile the plan took, and what was wrong."""
    os.environ["MLA_FP8KV_TILE_ROWS"] = str(rows)
    inputs = make_inputs(case)
    wrapper = new_wrapper()
    plan(wrapper, inputs)
    tile = TILE_ROWS[list(wrapper._plan_info)[1]]
    return tile, compare(case, *run_planned(wrapper, inputs), *reference(inputs))


def main() -> int:
    """Exit status: 0 if every variant ran and was right."""
    failed = False
    for kv, kpe in variants():
        reached = set()
        for name, shape in SHAPES.items():
            for rows in TILE_ROWS:
                case = Case(**{**vars(shape), "kv": kv, "kpe": kpe})
                tile, problems = run_shape(case, rows)
                reached.add((tile, case.group_scales))
                for problem in problems:
                    print(f"{kv} kpe {kpe}, {rows} rows, {name}: {problem}\n{case.line()}")
                failed |= bool(problems)
        expected = {(rows, scaled) for rows in TILE_ROWS for scaled in (False, True)}
        if reached != expected:
            print(f"{kv} kpe {kpe}: not reached: {sorted(expected - reached)}")
            failed = True
        print(f"{kv} kpe {kpe}: reached {sorted(reached)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
