"""Which kernel variant a plan takes, and that a captured one stays."""

import ctypes
import threading

import pytest
from plan_checker import PlanOwner, Problem


@pytest.fixture(scope="module")
def tiles(planner):
    return [planner.tile(8), planner.tile(16), planner.tile(32, 32), planner.tile(64, 64, 1)]


@pytest.mark.parametrize(
    "heads, rows",
    [(1, 8), (8, 8), (12, 16), (16, 16), (20, 32), (32, 32), (40, 64), (64, 64), (128, 64)],
)
@pytest.mark.parametrize("kv_len", [0, 1, 500, 32768])
@pytest.mark.parametrize("batch", [1, 300])
def test_decode(planner, tiles, heads, rows, kv_len, batch):
    """By heads alone: a CUDA graph captured with kv_len 1 must not fix a variant for short KV."""
    problem = Problem([1] * batch, [kv_len] * batch, num_heads=heads)
    assert tiles[planner.choose(problem, tiles)].rows == rows


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows(planner, tiles, causal):
    """Rows are (query, head) pairs: verify and prefill take larger tiles than decode."""

    def rows(qo_lens, kv_lens, heads):
        problem = Problem(qo_lens, kv_lens, num_heads=heads, causal=causal)
        return tiles[planner.choose(problem, tiles)].rows

    assert rows([2] * 16, [4096] * 16, 8) == 16
    assert rows([4] * 16, [4096] * 16, 8) == 32
    assert rows([4] * 16, [4096] * 16, 16) == 64
    assert rows([8192], [14101], 8) == 64
    assert rows([8192], [1], 8) == 64
    # Decode requests next to a chunk: who has most of the work decides.
    assert rows([4096] + [1] * 16, [4096] * 17, 8) == 64
    assert rows([8] + [1] * 250, [500] + [16384] * 250, 8) == 8


@pytest.mark.parametrize("heads, rows", [(8, 8), (16, 16), (20, 32), (32, 32), (33, 64), (128, 64)])
def test_the_wgmma_tiles(planner, tiles, heads, rows):
    """Faster ones in the place of those of as many rows do not change who gets which rows."""
    wgmma = [*tiles[:2], planner.tile(32, 64, 1, wgmma=True), planner.tile(64, 64, 1, wgmma=True)]
    for mma, one in zip(tiles[2:], wgmma[2:], strict=True):
        assert one.tile_cost / one.tokens < mma.tile_cost / mma.tokens
    problem = Problem([1] * 16, [4096] * 16, num_heads=heads)
    assert wgmma[planner.choose(problem, wgmma)].rows == rows


def test_devices_without_the_large_variant(planner, tiles):
    problem = Problem([1], [4096], num_heads=128)
    assert tiles[planner.choose(problem, tiles[:3])].rows == 32


def test_nothing_to_do_takes_the_first(planner, tiles):
    assert planner.choose(Problem([], []), tiles) == 0
    assert planner.choose(Problem([0, 0], [5, 0]), tiles) == 0


def test_grid_is_what_the_device_holds(planner, tiles):
    assert [planner.lib.shim_grid_size(ctypes.byref(tile), 132) for tile in tiles] == [
        264,
        264,
        264,
        132,
    ]


def test_first_captured_variant_stays(planner):
    owner = PlanOwner(0x1000, 0x2000, 16, False)
    assert planner.kept(owner) == -1
    planner.keep(owner, 3)
    planner.keep(owner, 1)
    assert planner.kept(PlanOwner(0x1000, 0x2000, 16, False)) == 3


def test_plans_for_another_launch_are_free(planner):
    planner.keep(PlanOwner(0x3000, 0x4000, 16, False), 2)
    for other in [
        (0x3001, 0x4000, 16, False),
        (0x3000, 0x4001, 16, False),
        (0x3000, 0x4000, 8, False),
        (0x3000, 0x4000, 16, True),
    ]:
        assert planner.kept(PlanOwner(*other)) == -1


def test_a_new_workspace_forgets_the_freed_one(planner):
    old = [PlanOwner(0x5000, f, heads, False) for f in (0x10, 0x20) for heads in (8, 128)]
    other = PlanOwner(0x5040, 0x10, 8, False)
    for owner in [*old, other]:
        planner.keep(owner, 1)
    planner.lib.shim_forget(ctypes.c_void_p(0x5000))
    assert [planner.kept(owner) for owner in [*old, other]] == [-1, -1, -1, -1, 1]


def test_registry_from_many_threads(planner):
    """ctypes releases the interpreter lock, so the calls really meet."""
    start = threading.Barrier(4)
    owners = [PlanOwner(0x100000 + 64 * i, 0, 8, False) for i in range(2000)]

    def work(thread):
        start.wait()
        for owner in owners:
            planner.keep(owner, thread)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(0 <= planner.kept(owner) < 4 for owner in owners)
