"""The compiled binding, run on CPU tensors: what it launches, and that it refuses by itself.

Python looks for a better sentence after a refusal only, so every refusal has to come from here.
"""

import numpy as np
import pytest
import torch
from calls import BF16, E5M2, csr, tensors

NOT_CAUSAL = 0
SLOTS = {
    name: index
    for index, name in enumerate(
        "float_workspace int_workspace plan_info q_nope q_pe ckv kpe kv_indices out lse mask_mode "
        "num_heads page_size sm_scale lse_base_e ckv_scale kpe_scale group_scales".split()
    )
}


@pytest.fixture
def workspaces():
    """Float, integer and pinned workspace."""
    sizes = (128 << 20, 8 << 20, 8 << 20)
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


@pytest.fixture
def good(binding, workspaces):
    """Arguments of a right run() of two requests, the first of which is split."""
    qo_indptr, kv_indptr, kv_indices, kv_len = csr([500, 7], page_size=4)
    module = binding.module
    module.forget(workspaces[1])
    info, staged = module.plan(*workspaces, qo_indptr, kv_indptr, kv_len, 8, 512, False)
    assert 0 < staged <= workspaces[1].numel()
    out = torch.full((2, 8, 512), 7, dtype=BF16)
    return [
        *(workspaces[0], workspaces[1], info, *tensors(pages=140, page_size=4), kv_indices, out),
        *(torch.zeros(2, 8), NOT_CAUSAL, 8, 4, 0.1, False, 1.0, 1.0, None),
    ]


def changed(good, **changes):
    given = list(good)
    for name, value in changes.items():
        given[SLOTS[name]] = value(given[SLOTS[name]]) if callable(value) else value
    return given


def spread(tensor):
    """The same shape with a gap after each element."""
    wide = torch.zeros(*tensor.shape, 2, dtype=torch.uint8)
    return wide.repeat_interleave(tensor.itemsize, -1).view(tensor.dtype)[..., 0]


def shifted(tensor):
    """The same shape, one element further in memory."""
    flat = torch.zeros((tensor.numel() + 16) * tensor.itemsize, dtype=torch.uint8)
    begin = tensor.itemsize
    return flat[begin:][: tensor.numel() * begin].view(tensor.dtype).view(tensor.shape)


def in_rows_of(width):
    def change(tensor):
        wide = torch.zeros(*tensor.shape[:-1], width * tensor.itemsize, dtype=torch.uint8)
        return wide.view(tensor.dtype)[..., : tensor.shape[-1]]

    return change


def huge(tensor):
    """Pages 40 GiB apart, of which only the addresses exist."""
    array = np.lib.stride_tricks.as_strided(
        np.zeros(1 << 12, np.uint8), (2, 4, tensor.shape[-1]), (40 << 30, 576, 1)
    )
    return torch.from_numpy(array).view(tensor.dtype)


REFUSED = {
    "another plan_info": ({"plan_info": [1, 2]}, "plan_info must come from plan()"),
    "plan_info of no tile": ({"plan_info": [1, 99, 264, 1, 8]}, "plan_info must come from plan()"),
    "other heads": ({"num_heads": 16}, "the query must have the 8 heads of the plan, got 16."),
    "sm_scale negative": ({"sm_scale": -0.1}, "sm_scale must be a finite number that is not"),
    "sm_scale NaN": ({"sm_scale": float("nan")}, "sm_scale must be a finite number that is not"),
    "sm_scale infinite": ({"sm_scale": float("inf")}, "sm_scale must be a finite number"),
    "ckv_scale 0": ({"ckv_scale": 0.0}, "ckv_scale must be a finite positive number, got 0."),
    "ckv_scale infinite": ({"ckv_scale": float("inf")}, "ckv_scale must be a finite positive"),
    "kpe_scale NaN": ({"kpe_scale": float("nan")}, "kpe_scale must be a finite positive number"),
    "page_size 0": ({"page_size": 0}, "page_size must be positive, got 0."),
    "query FP32": ({"q_nope": torch.Tensor.float}, "the query must be bfloat16 or float16."),
    "q_pe FP16": ({"q_pe": torch.Tensor.half}, "q_pe must be bfloat16, got float16."),
    "out FP16": ({"out": torch.Tensor.half}, "out must be bfloat16, got float16."),
    "caches BF16": (
        {"ckv": lambda t: t.to(BF16), "kpe": lambda t: t.to(BF16)},
        "ckv_cache and kpe_cache must have 8-bit elements.",
    ),
    "lse FP16": ({"lse": torch.Tensor.half}, "lse must be float32, got float16."),
    "indices int64": ({"kv_indices": torch.Tensor.long}, "kv_indices must be int32, got int64."),
    "indices with gaps": ({"kv_indices": spread}, "kv_indices must be contiguous."),
    "indices 2D": ({"kv_indices": lambda t: t[None]}, "kv_indices must have shape"),
    "lse of another shape": (
        {"lse": lambda t: t[:1].contiguous()},
        "lse must have shape [2, 8], got [1, 8].",
    ),
    "lse transposed": ({"lse": torch.zeros(8, 2).t()}, "lse must be contiguous."),
    "scales of another shape": (
        {"group_scales": torch.ones(140, 4, 3)},
        "ckv_scale_arr must have shape [140, 4, 4], got [140, 4, 3].",
    ),
    "scales BF16": (
        {"group_scales": torch.ones(140, 4, 4, dtype=BF16)},
        "ckv_scale_arr must be float32, got bfloat16.",
    ),
    "scales with gaps": (
        {"group_scales": torch.ones(140, 4, 8)[..., :4]},
        "ckv_scale_arr must be contiguous.",
    ),
    "scales misaligned": (
        {"group_scales": shifted(torch.ones(140, 4, 4))},
        "ckv_scale_arr must start at a multiple of 16 bytes.",
    ),
    "small float workspace": (
        {"float_workspace": lambda t: t[:1000]},
        "float_workspace_buffer is smaller than at plan time.",
    ),
}
for slot, name in (
    *(("q_nope", "q_nope"), ("q_pe", "q_pe"), ("out", "out")),
    *(("ckv", "ckv_cache"), ("kpe", "kpe_cache")),
):
    REFUSED |= {
        f"{name} of other heads or pages": (
            {slot: lambda t: t[:, :2]},
            f"{name} must have shape [",
        ),
        f"{name} narrow": ({slot: lambda t: t[..., :32]}, f"{name} must have shape ["),
        f"{name} flat": ({slot: lambda t: t.flatten(0, 1)}, f"{name} must have shape ["),
        f"{name} with gaps": ({slot: spread}, f"{name} must be contiguous in its last dimension"),
        f"{name} misaligned": ({slot: shifted}, f"{name} must start at a multiple of 16 bytes."),
        f"{name} in odd rows": ({slot: in_rows_of(517)}, f"{name} must be contiguous in its last"),
    }
for slot, name in (("q_pe", "q_pe"), ("out", "out"), ("kpe", "kpe_cache")):
    REFUSED[f"{name} shorter"] = ({slot: lambda t: t[:1]}, f"{name} must have shape [")
for slot, name in (("ckv", "ckv_cache"), ("kpe", "kpe_cache")):
    REFUSED[f"{name} over 32 GiB"] = (
        {"ckv": lambda t: t[:2], "kpe": lambda t: t[:2], slot: huge},
        f"{name} must span less than 32 GiB in each dimension, got 42949672960 bytes in dimension",
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(binding, good, name):
    changes, sentence = REFUSED[name]
    with pytest.raises(ValueError) as refusal:
        binding.module.run(*changed(good, **changes))
    assert str(refusal.value).startswith(sentence)
    assert binding.launched() == 0
    binding.module.run(*good)
    assert binding.launched() == 2


@pytest.mark.parametrize("slot", ["q_nope", "q_pe", "ckv", "kpe", "out", "lse"])
def test_tensors_of_another_device(binding, good, slot):
    """No second real device here: torch itself does not hand out meta tensors."""
    with pytest.raises((ValueError, BufferError, RuntimeError, TypeError)):
        binding.module.run(*changed(good, **{slot: lambda t: t.to("meta")}))
    assert binding.launched() == 0


ACCEPTED = {
    "as it is": {},
    "FP16": {name: torch.Tensor.half for name in ("q_nope", "q_pe", "out")},
    "no lse": {"lse": None},
    "group scales": {"group_scales": torch.ones(140, 4, 4)},
    "caches of whole layers": {"ckv": in_rows_of(1024), "kpe": in_rows_of(1024)},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(binding, good, name):
    binding.module.run(*changed(good, **ACCEPTED[name]))
    assert binding.launched() == 2


def test_one_query_token_may_have_any_stride(binding, workspaces):
    """What PyTorch says of a dimension of one element is arbitrary."""
    qo_indptr, kv_indptr, kv_indices, kv_len = csr([7])
    info, _ = binding.module.plan(*workspaces, qo_indptr, kv_indptr, kv_len, 8, 512, False)
    query = torch.zeros(8 * 576 + 1, dtype=BF16)[:-1].as_strided((1, 8, 576), (3, 576, 1))
    out = torch.zeros(1, 8, 512, dtype=BF16).as_strided((1, 8, 512), (5, 512, 1))
    caches = tensors(pages=9)[2:]
    binding.module.run(
        *(workspaces[0], workspaces[1], info, query[..., :512], query[..., 512:], *caches),
        *(kv_indices, out, None, NOT_CAUSAL, 8, 1, 0.1, False, 1.0, 1.0, None),
    )
    assert binding.launched() == 1, "nothing is split, nothing merged"


def test_a_captured_launch_has_its_merge_and_keeps_its_tile(binding, workspaces):
    """A replay may split what the captured plan did not, and other lengths would take more rows."""
    module = binding.module
    module.forget(workspaces[1])

    def plan(q_len, kv_len):
        qo_indptr, kv_indptr, kv_indices, lengths = csr([kv_len], [q_len])
        info, _ = module.plan(*workspaces, qo_indptr, kv_indptr, lengths, 8, 512, False)
        return list(info), kv_indices

    captured, kv_indices = plan(1, 1)
    free = plan(40, 3000)[0]
    assert free[1] > captured[1] and captured[3] == 0
    binding.capture(True)
    module.run(
        *(workspaces[0], workspaces[1], captured, *tensors(tokens=1), kv_indices),
        *(torch.zeros(1, 8, 512, dtype=BF16), None, NOT_CAUSAL, 8, 1, 0.1, False, 1.0, 1.0, None),
    )
    assert binding.launched() == 2
    binding.capture(False)
    assert plan(40, 3000)[0][:3] == captured[:3]
    module.forget(workspaces[1])
    assert plan(40, 3000)[0][:3] == free[:3]


def test_the_format_is_pythons_to_check(binding, good):
    """e5m2 bytes in a module of e4m3 are a wrong result, but no wrong launch."""
    changes = dict.fromkeys(("ckv", "kpe"), lambda t: t.view(E5M2))
    binding.module.run(*changed(good, **changes))
    assert binding.launched() == 2
