"""Which kernels a compiled module holds, and which of them a planned call launches.

A kernel is named by its kind, the rows of its tile and whether it takes group scales.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch

SCALED_ROWS = 16  # rows of the largest attention tile with group scales

# As registered with CUDA on the host, next to other strings of the library.
_SYMBOL = re.compile(rb"_ZN9mla_fp8kv\d+(\w+?)_kernelI(\w+?)EvNS_6ParamsE")


class Kernel(NamedTuple):
    kind: str  # "attention" or "merge"
    rows: int
    scaled: bool


class Work(NamedTuple):
    """What a plan makes the kernels do beside the usual."""

    rows: int  # of the plan's tile
    merges: bool  # rows were split, or see no token
    many: bool  # rows with so many partial results that a block merges one row
    further: bool  # CTAs with more than one item


def shipped(library: Path) -> set[Kernel]:
    """Every kernel of ours in a compiled module."""
    found = {}
    for kind, arguments in _SYMBOL.findall(library.read_bytes()):
        rows = int(re.search(rb"Li(\d+)E", arguments)[1])
        scaled = re.search(rb"Lb([01])E", arguments)[1] == b"1"
        kernel = Kernel(kind.decode(), rows, scaled)
        if found.setdefault(kernel, arguments) != arguments:
            raise ValueError(f"{library.name} has two kernels {kernel}: tell them apart here.")
    return set(found)


def in_profile(name: str) -> Kernel:
    """The kernel of a name as a profiler prints it."""
    kind, arguments = re.search(r"(\w+)_kernel<(.*)>", name).groups()
    arguments = arguments.replace("mla_fp8kv", "").replace("(bool)1", "true")
    rows = int(re.search(r"\d+", arguments)[0])
    return Kernel(kind, rows, re.search(r"true|false|\(bool\)0", arguments)[0] == "true")


def work(wrapper, tile_rows) -> Work:
    """Read from the plan's own records (kernel/params.h); `tile_rows` by tile index."""
    _, tile, grid, merge_items, _ = list(wrapper._plan_info)
    words = wrapper._int_workspace_buffer[: 64 + 48 * grid].cpu().view(torch.int32)
    further = words[16:].view(grid, 12)[:, 9]  # CtaWork::more_count
    return Work(tile_rows[tile], merge_items > 0, bool(words[2] > 0), bool((further > 0).any()))


def launched(plan: Work, scaled: bool) -> set[Kernel]:
    """The kernels that run() launches for a plan."""
    rows = min(plan.rows, SCALED_ROWS) if scaled else plan.rows
    merge = {Kernel("merge", plan.rows, scaled)} if plan.merges else set()
    return {Kernel("attention", rows, scaled)} | merge


def largest_rows() -> int:
    """Rows of the largest tile that fits this GPU."""
    optin = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return 64 if optin >= 210_000 else 32
