"""Every compiled variant runs and is right; a new tile that no shape here reaches fails."""

import pytest
import sanitize_shapes
import torch
from mla_cases import Case, make_inputs, new_wrapper, plan

pytestmark = pytest.mark.gpu


def fits_64_rows() -> bool:
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 210_000


@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kpe", [64, 0])
@pytest.mark.parametrize("rows", sanitize_shapes.TILE_ROWS)
def test_every_tile(kv, kpe, rows, monkeypatch):
    if rows == 64 and not fits_64_rows():
        pytest.skip("this GPU's blocks have too little shared memory for the 64-row tile")
    monkeypatch.setenv("MLA_FP8KV_TILE_ROWS", str(rows))
    for name, shape in sanitize_shapes.SHAPES.items():
        case = Case(**{**vars(shape), "kv": kv, "kpe": kpe})
        tile, problems = sanitize_shapes.run_shape(case, rows)
        assert tile == rows
        assert not problems, f"{name}: {problems}\nrepeat with: {case.line()}"


def test_the_list_of_tiles_is_complete():
    """Row counts beyond the largest tile take it, so the plan never names a tile not listed."""
    wrapper = new_wrapper()
    taken = set()
    for heads in range(1, 129, 3):
        for q_len in (1, 2, 3, 4, 8, 64):
            plan(wrapper, make_inputs(Case((q_len,) * 2, (3000, 100), heads)))
            taken.add(list(wrapper._plan_info)[1])
    assert taken <= set(range(len(sanitize_shapes.TILE_ROWS)))
    assert len(taken) >= 3
