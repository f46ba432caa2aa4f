"""Which kernels a compiled module holds, and which of them a planned call launches.

A kernel is named by its kind, the rows of its tile and whether it takes group scales.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

SCALED_ROWS = 16  # rows of the largest attention tile with group scales

# As registered with CUDA on the host, next to other strings of the library.
_SYMBOL = re.compile(rb"_ZN9mla_fp8kv\d+(\w+?)_kernelI(\w+?)EvNS_6ParamsE")


class Tile(NamedTuple):
    """A tile of the plan's choice; its products are wgmma's or mma.sync's, its warps four or eight.

    form: "" of each number of rows the one for all GPUs, "wgmma", or "wide": eight warps instead of
    four.
    """

    rows: int
    form: str = ""

    @property
    def wgmma(self) -> bool:
        return self.form == "wgmma"

    def __str__(self):
        return f"{self.rows} {self.form}".strip()

    def usable(self) -> bool:
        """Whether this GPU has it, in modules that convert as MLA_FP8KV_DEQUANT says."""
        gpu = torch.cuda.get_device_properties(0)
        large = self.rows == 64 or self.form == "wide"
        fits = not large or gpu.shared_memory_per_block_optin >= 160_000
        # A module that places bits shows what GPUs without wgmma do.
        places_bits = os.environ.get("MLA_FP8KV_DEQUANT") == "bits"
        return fits and not (self.wgmma and (gpu.major != 9 or places_bits))

    def variables(self) -> dict[str, str]:
        """What makes plan() take it, as environment variables."""
        chosen = {"MLA_FP8KV_TILE_ROWS": str(self.rows), "MLA_FP8KV_WGMMA": str(int(self.wgmma))}
        # With one CTA an SM the wide one has more warps there, unless it does not fit.
        if self == Tile(32):
            chosen["MLA_FP8KV_SMEM_LIMIT"] = "101376"
        if self.form == "wide":
            chosen["MLA_FP8KV_CTAS_PER_SM"] = "1"
        return chosen


# By the index that plan_info has (binding/variants.h).
TILES = (
    Tile(8),
    Tile(16),
    Tile(32),
    Tile(64),
    Tile(32, "wgmma"),
    Tile(64, "wgmma"),
    Tile(32, "wide"),
)


class Kernel(NamedTuple):
    kind: str  # "attention", "attention_wgmma", "attention_wide" or "merge"
    rows: int
    scaled: bool


class Work(NamedTuple):
    """What a plan makes the kernels do beside the usual."""

    tile: Tile
    merges: bool  # rows were split, or see no token
    many: bool  # rows with so many partial results that a block merges one row
    further: bool  # CTAs with more than one item


def shipped(library: Path) -> set[Kernel]:
    """Every kernel of ours in a compiled module."""
    found = {}
    for kind, arguments in _SYMBOL.findall(library.read_bytes()):
        numbers = [int(n) for n in re.findall(rb"Li(\d+)E", arguments)]
        first = re.search(rb"Lb([01])E", arguments)[1] == b"1"
        kernel = _kernel(kind.decode(), numbers, first, b"WgmmaTile" in arguments)
        if found.setdefault(kernel, arguments) != arguments:
            raise ValueError(f"{library.name} has two kernels {kernel}: tell them apart here.")
    return set(found)


def in_profile(name: str) -> Kernel:
    """The kernel of a name as a profiler prints it."""
    kind, arguments = re.search(r"(\w+)_kernel<(.*)>", name).groups()
    arguments = arguments.replace("mla_fp8kv", "").replace("(bool)1", "true")
    numbers = [int(n) for n in re.findall(r"\b\d+\b", arguments.replace("(int)", ""))]
    first = re.search(r"true|false|\(bool\)0", arguments)[0] == "true"
    return _kernel(kind, numbers, first, "WgmmaTile" in arguments)


def _kernel(kind: str, numbers: list[int], first: bool, wgmma: bool) -> Kernel:
    """Of a kernel's template arguments: its numbers, rows and warps first, and its first bool."""
    if kind != "merge":
        wide = numbers[:2] == [32, 8] and not wgmma
        kind = "attention" + "_wgmma" * wgmma + "_wide" * wide
    return Kernel(kind, numbers[0], first and not wgmma)


def work(wrapper) -> Work:
    """Read from the plan's own records (kernel/params.h)."""
    _, tile, grid, merge_items, _ = list(wrapper._plan_info)
    words = wrapper._int_workspace_buffer[: 64 + 48 * grid].cpu().view(torch.int32)
    further = words[16:].view(grid, 12)[:, 9]  # CtaWork::more_count
    return Work(TILES[tile], merge_items > 0, bool(words[1] > 0), bool((further > 0).any()))


def attention(tile: Tile, scaled: bool) -> Kernel:
    """The kernel that attends a tile of the plan."""
    if scaled:
        return Kernel("attention", min(tile.rows, SCALED_ROWS), True)
    return Kernel(f"attention_{tile.form}".rstrip("_"), tile.rows, False)


def launched(plan: Work, scaled: bool) -> set[Kernel]:
    """The kernels that run() launches for a plan."""
    merge = {Kernel("merge", plan.tile.rows, scaled)} if plan.merges else set()
    return {attention(plan.tile, scaled)} | merge


def usable_tiles() -> list[Tile]:
    """Of this GPU."""
    return [tile for tile in TILES if tile.usable()]


def use(tile: Tile | None, monkeypatch) -> None:
    """Makes plan() take a tile (None: its own choice), or skips where this GPU has none such."""
    if tile is not None:
        if not tile.usable():
            pytest.skip(f"this GPU has no tile of {tile} rows")
        for name, value in tile.variables().items():
            monkeypatch.setenv(name, value)
