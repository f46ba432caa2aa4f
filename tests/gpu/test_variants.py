"""Every kernel of every module runs and is right; one that no shape here reaches fails."""

import mla_cases
import pytest
import sanitize_shapes
import torch
import variants
from mla_cases import Case, make_inputs, new_wrapper, plan, run_planned
from sanitize_shapes import MODULES, SHAPES
from variants import Kernel, use

SHIPPED = [name for name, (_, _, selection) in MODULES.items() if not selection]


@pytest.mark.gpu
def test_every_tile_is_listed():
    """TILES, by which the other tests force tiles, against the kernels of the library."""
    plan(new_wrapper(), make_inputs(Case((1,), (100,), 8)))  # loads the module
    kernels = {one for one in sanitize_shapes.shipped("e4m3_64") if not one.scaled}
    kernels = {one for one in kernels if one.kind != "merge"}
    assert kernels == {variants.attention(tile, False) for tile in variants.TILES}


@pytest.mark.gpu
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel(module):
    said = []
    assert sanitize_shapes.run_module(module, said.append), "\n".join(said)


@pytest.mark.gpu
def test_the_list_of_tiles_is_complete():
    """Row counts beyond the largest tile take it, so the plan never names a tile not listed."""
    wrapper = new_wrapper()
    taken = set()
    for heads in range(1, 129, 3):
        for q_len in (1, 2, 3, 4, 8, 64):
            plan(wrapper, make_inputs(Case((q_len,) * 2, (3000, 100), heads)))
            taken.add(list(wrapper._plan_info)[1])
    assert {variants.TILES[index] for index in taken} <= set(variants.usable_tiles())
    assert len(taken) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("tile", variants.TILES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_launches_what_is_said_of_it(name, tile, monkeypatch):
    """What decides which kernels count as run, checked against the profiler."""
    use(tile, monkeypatch)
    wrapper, inputs = new_wrapper(), make_inputs(SHAPES[name])
    plan(wrapper, inputs)
    run_planned(wrapper, inputs)  # whatever is loaded on first use
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_planned(wrapper, inputs)
        torch.cuda.synchronize()
    ours = [event.key for event in profile.key_averages() if "mla_fp8kv" in event.key]
    if not ours:
        pytest.skip("the profiler sees no kernels on this machine")
    work = variants.work(wrapper)
    assert work.tile == tile
    expected = variants.launched(work, SHAPES[name].group_scales)
    assert {variants.in_profile(key) for key in ours} == expected


def test_kernels_are_found_in_a_library(tmp_path):
    library = tmp_path / "module.so"
    tile = b"INS_4TileILi%dELi4ELi64ELi2ELi1ELi2ELi64ELb%dELb0EEELNS_6FormatE0ELb0EEEvNS_6ParamsE"
    attention = b"_ZN9mla_fp8kv16attention_kernel" + tile
    merge = b"_ZN9mla_fp8kv12merge_kernelILi64ELb1EEEvNS_6ParamsE"
    stub = b"_ZZL124__device_stub_" + attention % (8, 0) + b"RKN9mla_fp8kv6ParamsEE5__tmp"
    wgmma = b"INS_9WgmmaTileILi%dELi8ELi128ELi1ELi64EEELNS_6FormatE0ELb1EEEvNS_6ParamsE"
    plain = b"_ZN9mla_fp8kv16attention_kernel" + wgmma % 32
    staggered = b"_ZN9mla_fp8kv26attention_staggered_kernel" + wgmma % 64
    wide = (attention % (32, 0)).replace(b"Li4ELi64", b"Li8ELi64")
    names = [attention % (8, 0), attention % (16, 1), wide, plain, staggered, merge, stub]
    library.write_bytes(b"\0".join(names))
    assert variants.shipped(library) == {
        Kernel("attention", 8, False),
        Kernel("attention_wide", 32, False),
        Kernel("attention_wgmma", 32, False),
        Kernel("attention_wgmma", 64, False),
        Kernel("attention", 16, True),
        Kernel("merge", 64, True),
    }
    library.write_bytes(attention % (8, 0) + b"\0" + (attention % (8, 0)).replace(b"Li4", b"Li8"))
    with pytest.raises(ValueError, match="two kernels"):
        variants.shipped(library)


@pytest.mark.parametrize(
    "name, kernel",
    [
        (
            "void mla_fp8kv::attention_kernel<"
            "mla_fp8kv::Tile<16, 4, 64, 2, 1, 2, 64, true>, "
            "(mla_fp8kv::Format)0, false>(mla_fp8kv::Params)",
            Kernel("attention", 16, True),
        ),
        (
            "void mla_fp8kv::attention_staggered_kernel<mla_fp8kv::WgmmaTile<64, 8, 128, 1, 64>, "
            "(mla_fp8kv::Format)0, true>(mla_fp8kv::Params)",
            Kernel("attention_wgmma", 64, False),
        ),
        (
            "void mla_fp8kv::attention_kernel<mla_fp8kv::Tile<(int)32, (int)8, (int)64, (int)3, "
            "(int)1, (int)1, (int)64, (bool)0>, (mla_fp8kv::Format)0, (bool)1>",
            Kernel("attention_wide", 32, False),
        ),
        ("void mla_fp8kv::merge_kernel<(int)32, (bool)0>(mla_fp8kv::Params)", ("merge", 32, False)),
    ],
)
def test_kernels_are_found_in_a_profile(name, kernel):
    assert variants.in_profile(name) == kernel


def test_every_shipped_module_is_in_the_list():
    from mla_fp8kv import capability

    formats = mla_cases.FP8
    expected = {f"{kv}_{kpe}" for kv in formats for kpe in capability.HEAD_DIMS_KPE}
    assert set(SHIPPED) == expected


def test_inputs_keep_their_layout_on_the_way(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "cuda", lambda self: self.clone())
    for layout in ("sglang", "separate", "layers"):
        before = make_inputs(Case((1, 2), (65, 7), 8, 3, layout=layout), device="cpu")
        after = sanitize_shapes.on_gpu(before)
        for old, new in zip(before.tensors(), after.tensors(), strict=True):
            assert (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)
            assert old.data_ptr() != new.data_ptr()
            width = {1: torch.uint8, 2: torch.int16}[old.itemsize]
            assert torch.equal(old.view(width), new.view(width))
