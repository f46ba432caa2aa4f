"""Runs the plan through its C shim and checks what it wrote against params.h's rules.

The checker reads the staged bytes as the kernels do (records by CTA, merge items through the
header) and shares no code with plan.h.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import subprocess

import numpy as np

KERNEL_DIR = pathlib.Path(__file__).resolve().parents[2] / "python" / "mla_fp8kv" / "kernel"
SHIM = pathlib.Path(__file__).resolve().with_name("plan_shim.cpp")

NOT_CAUSAL = MAX_KV_LEN = MAX_PACKED_ROWS = 0x3FFFFFFF

WORK_ITEM = np.dtype(
    [
        (name, np.int32)
        for name in "q_begin row_begin rows partial page_begin kv_begin kv_end causal_end".split()
    ]
)
CTA_WORK = np.dtype(
    [
        ("first", WORK_ITEM),
        ("more_begin", np.int32),
        ("more_count", np.int32),
        ("reserved", np.int32, 2),
    ]
)
MERGE_ITEM = np.dtype(
    [(name, np.int32) for name in "q_begin row_begin rows slot_begin count".split()]
    + [("reserved", np.int32, 3)]
)
HEADER = np.dtype(
    [(name, np.int32) for name in "num_merge_items num_many".split()] + [("reserved", np.int32, 14)]
)
CTA_WORK_OFFSET = 64


def merge_offset(grid: int) -> int:
    """Where the merge items begin: after the CTAs' records, at a multiple of their own size."""
    end = CTA_WORK_OFFSET + grid * CTA_WORK.itemsize
    return -(-end // MERGE_ITEM.itemsize) * MERGE_ITEM.itemsize


def least_merge_bytes(grid: int) -> int:
    """Bytes of the merge items that exist whatever the plan is."""
    return (grid // 2 + 1) * MERGE_ITEM.itemsize


FEW_PARTIALS = 16  # params.h

STATUS = (
    "ok bad_launch num_heads qo_indptr kv_indptr kv_len packed_rows too_many_items float_capacity "
    "int_capacity"
).split()


class TileShape(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("ctas_per_sm", ctypes.c_int32),
        ("tile_cost", ctypes.c_float),
        ("item_cost", ctypes.c_float),
    ]

    def __repr__(self):
        return f"TileShape({self.rows}, {self.tokens}, {self.ctas_per_sm}, {self.tile_cost:g}, " + (
            f"{self.item_cost:g})"
        )


class PlanInput(ctypes.Structure):
    _fields_ = [
        ("qo_indptr", ctypes.c_void_p),
        ("kv_indptr", ctypes.c_void_p),
        ("kv_len", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("causal", ctypes.c_bool),
    ]


class PlanResult(ctypes.Structure):
    _fields_ = [
        ("staged_bytes", ctypes.c_int64),
        ("num_items", ctypes.c_int32),
        ("num_merge_items", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("request", ctypes.c_int32),
        ("limit", ctypes.c_int64),
        ("given", ctypes.c_int64),
    ]


class PlanOwner(ctypes.Structure):
    _fields_ = [
        ("int_workspace", ctypes.c_void_p),
        ("float_workspace", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("causal", ctypes.c_bool),
    ]


@dataclasses.dataclass
class Problem:
    """One call of plan(): lengths per request, packed into indptrs."""

    qo_lens: list[int]
    kv_lens: list[int]
    num_heads: int = 8
    causal: bool = False
    page_size: int = 1
    q_start: int = 0  # qo_indptr[0]

    def arrays(self):
        qo = np.cumsum([self.q_start, *self.qo_lens]).astype(np.int32)
        pages = [-(-kv // self.page_size) for kv in self.kv_lens]
        return qo, np.cumsum([0, *pages]).astype(np.int32), np.array(self.kv_lens, np.int32)

    def visible(self, request: int, row: int) -> int:
        """Number of tokens that a packed row sees."""
        kv_len = self.kv_lens[request]
        if not self.causal:
            return kv_len
        query = row // self.num_heads
        return max(0, kv_len - self.qo_lens[request] + query + 1)

    def row_tiles(self, rows: int):
        """(request, row_begin, rows, tokens its last row sees)"""
        for b, qo_len in enumerate(self.qo_lens):
            packed = qo_len * self.num_heads
            for begin in range(0, packed, rows):
                end = min(begin + rows, packed)
                yield b, begin, end - begin, self.visible(b, end - 1)


class Plan:
    def __init__(self, status, result, staged, grid):
        self.status, self.result, self.staged, self.grid = status, result, staged, grid
        if status != "ok":
            return
        raw = staged[: result.staged_bytes]
        self.header = raw[: HEADER.itemsize].view(HEADER)[0]
        end = CTA_WORK_OFFSET + grid * CTA_WORK.itemsize
        self.ctas = raw[CTA_WORK_OFFSET:end].view(CTA_WORK)
        begin = merge_offset(grid)
        end = begin + int(self.header["num_merge_items"]) * MERGE_ITEM.itemsize
        self.merges = raw[begin:end].view(MERGE_ITEM)
        self.merge_end = end
        self._all_items = raw[: raw.size // WORK_ITEM.itemsize * WORK_ITEM.itemsize].view(WORK_ITEM)

    def items(self, cta: int):
        record = self.ctas[cta]
        if record["first"]["rows"] == 0:
            assert record.tobytes() == bytes(CTA_WORK.itemsize), f"CTA {cta}: stale record"
            return []
        begin, count = int(record["more_begin"]), int(record["more_count"])
        further = self._all_items[begin : begin + count]
        assert len(further) == count, f"CTA {cta}: further items beyond the staged bytes"
        return [record["first"], *further]


class Planner:
    """plan.h, compiled from `kernel_dir` into `build_dir`."""

    GUARD = 0xA5

    def __init__(self, build_dir, kernel_dir=KERNEL_DIR, flags=("-O1",)):
        library = pathlib.Path(build_dir) / "plan_shim.so"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-Wall", "-Wextra", "-Werror"]
        command += [*flags, "-shared", "-fPIC", f"-I{kernel_dir}", str(SHIM), "-o", str(library)]
        subprocess.run(command, check=True)
        self.library = library
        self.lib = ctypes.CDLL(str(library))
        self.lib.shim_max_slots.restype = ctypes.c_int64

    def tile(self, rows, tokens=64, ctas_per_sm=2, wgmma=False) -> TileShape:
        shape = TileShape()
        self.lib.shim_make_tile_shape(rows, tokens, ctas_per_sm, wgmma, ctypes.byref(shape))
        return shape

    def input(self, problem, arrays=None):
        arrays = [np.ascontiguousarray(a) for a in (arrays or problem.arrays())]
        pointers = [a.ctypes.data for a in arrays]
        data = PlanInput(*pointers, len(arrays[2]), problem.num_heads, problem.causal)
        return data, arrays  # the caller keeps the arrays alive

    def keep(self, owner: PlanOwner, tile: int) -> None:
        self.lib.shim_keep(ctypes.byref(owner), tile)

    def kept(self, owner: PlanOwner) -> int:
        return self.lib.shim_kept(ctypes.byref(owner))

    def choose(self, problem, tiles) -> int:
        data, _keep = self.input(problem)
        return self.lib.shim_choose_tile(
            ctypes.byref(data), (TileShape * len(tiles))(*tiles), len(tiles)
        )

    def plan(self, problem, tile, grid, capacity=4 << 20, slots=None, arrays=None) -> Plan:
        data, _keep = self.input(problem, arrays)
        memory = np.full(capacity + 64 + 4096, self.GUARD, np.uint8)
        offset = -memory.ctypes.data % 64
        staged = memory[offset : offset + capacity]
        result = PlanResult()
        status = self.lib.shim_make_plan(
            ctypes.byref(data),
            ctypes.byref(tile),
            grid,
            ctypes.c_int64(2 * grid if slots is None else slots),
            ctypes.c_void_p(staged.ctypes.data),
            ctypes.c_int64(capacity),
            ctypes.byref(result),
        )
        written = result.staged_bytes if STATUS[status] == "ok" else 0
        assert (memory[:offset] == self.GUARD).all(), "bytes before the workspace were written"
        assert (memory[offset + written :] == self.GUARD).all(), "bytes beyond staged_bytes written"
        return Plan(STATUS[status], result, staged, grid)

    def error(self, plan) -> str:
        text = ctypes.create_string_buffer(400)
        status = STATUS.index(plan.status)
        self.lib.shim_plan_error(status, ctypes.byref(plan.result), text, ctypes.c_size_t(400))
        return text.value.decode()


def one_piece_limit(kv_tiles, tile, grid):
    """Kv tiles a CTA may get when each gets one piece, or None: the rule stated in plan.h."""
    even = -(-sum(kv_tiles) // grid)
    slack = int(tile.item_cost / tile.tile_cost)
    for limit in range(max(1, even), even + slack + 1):
        if sum(-(-n // limit) for n in kv_tiles) <= grid:
            return limit
    return None


def check_plan(problem: Problem, tile: TileShape, plan: Plan) -> None:
    """Raises AssertionError on the first rule that the plan breaks."""
    assert plan.status == "ok", plan.status
    qo_indptr, kv_indptr, _ = problem.arrays()
    request_at = {int(qo_indptr[b]): b for b, n in enumerate(problem.qo_lens) if n > 0}

    end_of_least = merge_offset(plan.grid) + least_merge_bytes(plan.grid)
    spare = plan.staged[plan.merge_end : end_of_least]
    assert not spare.any(), "the merge reads items beyond the plan's own: they have no rows"

    # Read every CTA's items in order; the line is the concatenation of the CTAs' ranges.
    line = []
    first_further = max(plan.merge_end, end_of_least) // WORK_ITEM.itemsize
    further = first_further
    for cta in range(plan.grid):
        items = plan.items(cta)
        if len(items) > 1:
            assert plan.ctas[cta]["more_begin"] == further, "further items overlap or leave a gap"
            further += len(items) - 1
        partial = sum(int(item["partial"]) >= 0 for item in items)
        assert partial <= 2, f"CTA {cta} writes {partial} partial results"
        line += [(cta, {name: int(item[name]) for name in WORK_ITEM.names}) for item in items]
    assert plan.result.staged_bytes == further * WORK_ITEM.itemsize, "staged bytes"
    assert plan.result.num_items == len(line), "num_items"

    pieces = {}
    for cta, item in line:
        assert item["rows"] > 0 and item["kv_begin"] < item["kv_end"], f"empty work: {item}"
        assert item["q_begin"] in request_at, f"no request begins at {item['q_begin']}"
        b = request_at[item["q_begin"]]
        assert item["page_begin"] == kv_indptr[b], "page_begin"
        causal_end = NOT_CAUSAL
        if problem.causal:
            causal_end = problem.kv_lens[b] - problem.qo_lens[b] + 1
        assert item["causal_end"] == causal_end, "causal_end"
        pieces.setdefault((b, item["row_begin"]), []).append((cta, item))

    merges = {}
    for merge in plan.merges:
        key = request_at[int(merge["q_begin"])], int(merge["row_begin"])
        assert key not in merges, f"rows merged twice: {key}"
        merges[key] = merge

    # Every row tile: its tokens covered once and in order, its rows written by exactly one party.
    slots = []
    kv_tiles = []
    for b, row_begin, rows, visible in problem.row_tiles(tile.rows):
        mine = pieces.pop((b, row_begin), [])
        merge = merges.pop((b, row_begin), None)
        position = 0
        for _, item in mine:
            assert item["rows"] == rows, "rows of an item"
            assert item["kv_begin"] == position, (
                f"token {position} of request {b} left out or twice"
            )
            position = item["kv_end"]
            assert position == visible or position % tile.tokens == 0, "cut inside a kv tile"
        assert position == visible, f"request {b} row {row_begin}: {position} of {visible} tokens"
        partial = [item["partial"] for _, item in mine]
        if len(mine) == 1:
            assert partial == [-1] and merge is None, "whole rows are written by their item"
        else:
            assert merge is not None and merge["rows"] == rows, "split or unseen rows need a merge"
            assert merge["count"] == len(mine), "count of a merge item"
            begin = int(merge["slot_begin"])
            assert partial == list(range(begin, begin + len(mine))), "slots in kv order"
            slots += partial
        if visible > 0:
            kv_tiles.append(-(-visible // tile.tokens))
    assert not pieces and not merges, f"rows that do not exist: {[*pieces, *merges]}"
    assert slots == list(range(len(slots))), "slots are counted along the line"
    assert len(slots) == plan.result.num_slots <= 2 * plan.grid, "slot capacity"
    counts = [int(m["count"]) for m in plan.merges]
    merged_rows = sum(int(m["rows"]) for m in plan.merges if m["count"] > FEW_PARTIALS)
    rounds = max(1, -(-128 * merged_rows // (plan.grid * tile.rows)))
    many = [count > 2 * FEW_PARTIALS * rounds for count in counts]
    assert plan.header["num_many"] == sum(many), "num_many"
    assert many == sorted(many, reverse=True), "items with many partials come first"
    assert plan.result.num_merge_items == len(counts), "num_merge_items"

    check_balance(kv_tiles, tile, plan, line)


def check_balance(kv_tiles, tile, plan, line) -> None:
    """The bounds that plan.h states, in units of one kv tile."""
    item_cost = tile.item_cost / tile.tile_cost
    item_tiles = [-(-(i["kv_end"] - i["kv_begin"]) // tile.tokens) for _, i in line]
    limit = one_piece_limit(kv_tiles, tile, plan.grid)
    if limit is not None:
        assert [cta for cta, _ in line] == list(range(len(line))), "one piece a CTA"
        assert max(item_tiles, default=0) <= limit, "a piece above the one-piece limit"
        groups = {}
        for (_, item), tiles in zip(line, item_tiles, strict=True):
            groups.setdefault((item["q_begin"], item["row_begin"]), []).append(tiles)
        for sizes in groups.values():
            assert max(sizes) - min(sizes) <= 1, f"pieces of one row tile differ: {sizes}"
        return
    cost = np.zeros(plan.grid)
    for (cta, item), tiles in zip(line, item_tiles, strict=True):
        cost[cta] += item_cost + tiles
        assert item["partial"] < 0 or tiles > item_cost - 1 / 16, "a piece not worth its item"
    even = (sum(kv_tiles) + len(kv_tiles) * item_cost) / plan.grid
    # 1/16: plan.h rounds costs to sixteenths of a tile.
    assert cost.max() <= even + 4 * item_cost + 2 + 1 / 16, f"{cost.max()} where {even} is even"


def check_coverage_by_hand(problem: Problem, tile: TileShape, plan: Plan) -> None:
    """Counts for each (row, token) how often the kernel would attend it. For small problems."""
    qo_indptr, kv_indptr, _ = problem.arrays()
    rows_total = int(qo_indptr[-1]) * problem.num_heads
    tokens = max(problem.kv_lens, default=0)
    seen = np.zeros((rows_total, tokens), np.int32)
    written = np.zeros(rows_total, np.int32)
    for cta in range(plan.grid):
        for item in plan.items(cta):
            for row in range(int(item["row_begin"]), int(item["row_begin"]) + int(item["rows"])):
                end = min(int(item["kv_end"]), int(item["causal_end"]) + row // problem.num_heads)
                out_row = int(item["q_begin"]) * problem.num_heads + row
                seen[out_row, int(item["kv_begin"]) : max(end, 0)] += 1
                written[out_row] += item["partial"] < 0
    for merge in plan.merges:
        begin = int(merge["q_begin"]) * problem.num_heads + int(merge["row_begin"])
        written[begin : begin + int(merge["rows"])] += 1
    expected = np.zeros_like(seen)
    for b, qo_len in enumerate(problem.qo_lens):
        for row in range(qo_len * problem.num_heads):
            out_row = int(qo_indptr[b]) * problem.num_heads + row
            expected[out_row, : problem.visible(b, row)] = 1
    np.testing.assert_array_equal(seen, expected)
    first = problem.q_start * problem.num_heads
    assert (written[:first] == 0).all() and (written[first:] == 1).all(), "rows written not once"
