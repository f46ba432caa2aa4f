"""Random steps in one process for a while: memory must stay flat, every 100th result is checked.

python tests/gpu/soak.py --seconds 600
"""

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
from mla_cases import compare, make_inputs, new_wrapper, plan, reference, run_planned
from test_random import sample

# Steps after which allocators and caches have seen every kind of case.
WARM_UP = 300


def resident_bytes() -> int:
    """Host memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def memory() -> tuple[int, int]:
    """Bytes of live GPU tensors, and of the process on the host."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated(), resident_bytes()


def step(wrapper, seed: int, checked: bool) -> list[str]:
    """Plan and run the case of a seed; what is wrong with it, if it is checked."""
    case = sample(seed)
    inputs = make_inputs(case)
    plan(wrapper, inputs)
    got = run_planned(wrapper, inputs)
    if not checked:
        return []
    return [f"{text}\n{case.line()}" for text in compare(case, *got, *reference(inputs))]


def main() -> int:
    """Exit status: 0 if every checked result was right and memory stayed flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1_000_000)
    options = parser.parse_args()

    wrappers = [new_wrapper() for _ in range(3)]
    end = time.monotonic() + options.seconds
    count, problems, before = 0, [], None
    while time.monotonic() < end:
        checked = count % 100 == 0
        problems += step(wrappers[count % 3], options.seed + count, checked)
        count += 1
        if count == WARM_UP:
            before = memory()
    # The wrappers hold their last plans, of other sizes than at the start.
    slack = (64 << 20, 256 << 20)
    if before is not None:
        for kind, old, new, allowed in zip(("GPU", "host"), before, memory(), slack, strict=True):
            print(
                f"{kind} memory: {old >> 20} MiB after {WARM_UP} steps, {new >> 20} MiB at the end"
            )
            if new - old > allowed:
                problems.append(f"{kind} memory grew by {new - old} bytes")
    print(f"{count} steps, {-(-count // 100)} results checked, {len(problems)} problems")
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
