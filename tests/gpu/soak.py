"""Random steps in one process for a while: memory must stay flat, every 100th result is checked.

    python tests/gpu/soak.py --seconds 590

The seconds count from the start of the process, imports included, so that a time limit a few
seconds above them holds.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import torch
from mla_cases import compare, make_inputs, new_wrapper, plan, reference, run_planned
from test_random import sample

# Steps after which allocators and caches have seen every kind of case.
WARM_UP = 300
PROGRESS_SECONDS = 60
MIB = 1 << 20
# What may be more at the end, in MiB: the wrappers hold their last plans, of other sizes than at
# the start, and CPython and malloc keep some of what they freed.
SLACK = {"GPU tensors": 64, "GPU beside tensors": 128, "host": 256}


def process_age() -> float:
    """Seconds since this process began."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def memory() -> dict[str, int]:
    """MiB in use by this process, by the names of SLACK; the GPU must be ours alone."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "GPU tensors": torch.cuda.memory_allocated() // MIB,
        "GPU beside tensors": (total - free - torch.cuda.memory_reserved()) // MIB,
        "host": pages * os.sysconf("SC_PAGE_SIZE") // MIB,
    }


def growth(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What grew by more than its slack."""
    return [
        f"{kind} memory grew from {before[kind]} to {after[kind]} MiB"
        for kind, slack in SLACK.items()
        if after[kind] - before[kind] > slack
    ]


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=590)
    parser.add_argument("--seed", type=int, default=1_000_000)
    options = parser.parse_args()

    wrappers = [new_wrapper() for _ in range(3)]
    begun = said = time.monotonic()
    end = begun + options.seconds - process_age()
    count, problems, before = 0, [], None
    while time.monotonic() < end:
        checked = count % 100 == 0
        problems += step(wrappers[count % 3], options.seed + count, checked)
        count += 1
        if count == WARM_UP:
            before = memory()
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            print(f"{count} steps, {len(problems)} problems", flush=True)
    if before is None:
        problems.append(f"only {count} steps: memory is compared with that after {WARM_UP}")
    else:
        after = memory()
        problems += growth(before, after)
        for kind, old in before.items():
            print(f"{kind}: {old} MiB after {WARM_UP} steps, {after[kind]} MiB at the end")
    print(
        f"{count} steps in {time.monotonic() - begun:.0f} s, {-(-count // 100)} results checked, "
        f"{len(problems)} problems"
    )
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
