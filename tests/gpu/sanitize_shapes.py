r"""Runs every kernel of every module on small shapes, for the four tools of compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python tests/gpu/sanitize_shapes.py
    compute-sanitizer --tool racecheck --error-exitcode 1 \
        --kernel-name-exclude kernel_substring=attention_staggered \
        python tests/gpu/sanitize_shapes.py
    compute-sanitizer --tool initcheck --error-exitcode 1 python tests/gpu/sanitize_shapes.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize_shapes.py

Arguments, such as `e4m3_64`, keep only these modules. Each result is compared with float64 as well,
and the script fails if a kernel that the modules hold did not run.

racecheck (2025.3.1) does not order what a thread reads before it says with bar.arrive that it was
there, and reports two warps that take turns that way; with bar.sync in the place of bar.arrive it
does not. Of mbarriers it says the same. It cannot judge the staggered kernel, then. The host
execution (tests/host) does: its clocks order both.

Inputs are made and results compared on the CPU, so what runs on the GPU are copies and our kernels.
Every tensor is an allocation of its own: memory that the kernels must write before they read it, as
the workspaces and `out`, is really uninitialised, and a read beyond a tensor finds no neighbour.
"""

import argparse
import os
import sys
from dataclasses import fields, replace
from unittest import mock

import torch
import variants
from mla_cases import FP8, Case, Inputs, compare, make_inputs, new_wrapper, plan, reference
from mla_cases import run_planned as run_on_gpu

# (format, head_dim_kpe, what selects the module at plan time)
MODULES = {
    "e4m3_64": ("e4m3", 64, {}),
    "e4m3_0": ("e4m3", 0, {}),
    "e5m2_64": ("e5m2", 64, {}),
    "e5m2_0": ("e5m2", 0, {}),
    "e4m3_64_bits": ("e4m3", 64, {"MLA_FP8KV_DEQUANT": "bits"}),
    "e4m3_64_loads": ("e4m3", 64, {"MLA_FP8KV_LOADS_ONLY": "1"}),
}
# More row tiles of 8 rows than any GPU has CTAs resident with ONE_CTA an SM. (A race is within a
# CTA, and the tools take their time for each.)
MANY = 220
ONE_CTA = {"MLA_FP8KV_CTAS_PER_SM": "1"}
SHAPES = {
    "split, page size 3, an empty request": Case((1, 2, 1), (700, 65, 0), 8, 3),
    "not split, causal": Case((5, 3), (64, 2), 12, causal=True),
    "many partial results": Case((1,), (3000,), 8),
    "more items than CTAs": Case((1,) * MANY, (70,) * MANY, 8, 64),
    "fp16 query": Case((1, 2), (130, 65), 8, q="fp16", lse=None),
    "group scales, split": Case((1, 2), (700, 65), 8, group_scales=True, lse="basee"),
    "group scales, not split": Case((2,), (33,), 8, 16, group_scales=True),
    "group scales, many partial results": Case((1,), (3000,), 8, group_scales=True),
    "group scales, more items than CTAs": Case((1,) * MANY, (70,) * MANY, 8, group_scales=True),
}


def case_of(shape: Case, module: str) -> Case:
    """The shape with the format and dims of a module."""
    kv, kpe, _ = MODULES[module]
    return replace(shape, kv=kv, kpe=kpe)


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage, seen through the same offset and strides."""
    storage = tensor.untyped_storage().cuda()
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_gpu(inputs: Inputs) -> Inputs:
    """Inputs on the GPU, in the layout they have on the CPU."""
    moved = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    for name, value in moved.items():
        if isinstance(value, torch.Tensor):
            moved[name] = to_gpu(value)
    return Inputs(**moved)


def shipped(module: str) -> set[variants.Kernel]:
    """The kernels of a module, from its library; it must have been loaded."""
    from mla_fp8kv import jit

    kv, kpe, _ = MODULES[module]
    spec = jit.gen_module(FP8[kv], kpe, jit.dequant_bits(), jit.loads_only())
    return variants.shipped(spec.get_library_path())


def required(kernels: set[variants.Kernel], tiles: list[variants.Tile]) -> set:
    """What a module's shapes must reach on a GPU that has these tiles."""
    rows = {tile.rows for tile in tiles}
    merges = {one for one in kernels if one.kind == "merge" and one.rows in rows}
    special = {(name, one.rows, one.scaled) for one in merges for name in ("many", "further")}
    unusable = {variants.attention(tile, False) for tile in set(variants.TILES) - set(tiles)}
    return {one for one in kernels - unusable if one.kind != "merge"} | merges | special


def say_now(text: str) -> None:
    """Print at once: a tool may take minutes for a shape."""
    print(text, flush=True)


def run_module(module: str, say=say_now) -> bool:
    """Run all shapes of a module with every tile; whether all went well."""
    selection = MODULES[module][2]
    wrapper = new_wrapper()
    kernels, reached, good = set(), set(), True
    with mock.patch.dict(os.environ, selection):
        tiles = variants.usable_tiles()
    for name, shape in SHAPES.items():
        case = case_of(shape, module)
        inputs = make_inputs(case, device="cpu")
        want = reference(inputs)
        moved = on_gpu(inputs)
        for tile in tiles:
            with mock.patch.dict(os.environ, selection | ONE_CTA | tile.variables()):
                plan(wrapper, moved)
                kernels = kernels or shipped(module)
                got = [one.cpu() if one is not None else None for one in run_on_gpu(wrapper, moved)]
            work = variants.work(wrapper)
            reached |= variants.launched(work, case.group_scales)
            for path in ("many", "further"):
                if getattr(work, path):
                    reached.add((path, work.tile.rows, case.group_scales))
            # Without its products a kernel is wrong on purpose.
            problems = [] if "MLA_FP8KV_LOADS_ONLY" in selection else compare(case, *got, *want)
            for problem in problems:
                say(f"{module}, {tile} rows, {name}: {problem}\n{case.line()}")
            good &= not problems
        say(f"{module}: {name}: done")
    missing = required(kernels, tiles) - reached
    if missing:
        say(f"{module}: not reached: {sorted(missing)}")
    say(f"{module}: {len(kernels)} kernels, reached {len(kernels & reached)}")
    return good and not missing


def main() -> int:
    """Exit status: 0 if every kernel ran and was right."""
    parser = argparse.ArgumentParser(description="Run every kernel, for compute-sanitizer.")
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(MODULES)}; all if none is given")
    modules = parser.parse_args().modules or list(MODULES)
    if unknown := [name for name in modules if name not in MODULES]:
        parser.error(f"no module {unknown[0]}")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    return int(not all([run_module(module) for module in modules]))


if __name__ == "__main__":
    sys.exit(main())
