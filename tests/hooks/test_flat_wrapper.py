"""FlashInfer 0.6's wrapper: what it leaves to us, and how it goes from one dtype to another."""

import pytest
import torch
from calls import BF16, E4M3, E5M2, FP16, csr, graph_wrapper, make, plan_flat, taken_by, tensors
from flashinfer_base import flat_wrapper_only

pytestmark = flat_wrapper_only


def sentence(call, *arguments, **keywords):
    with pytest.raises(ValueError) as refusal:
        call(*arguments, **keywords)
    return str(refusal.value)


def test_fp8_is_ours_for_fa3_too(flashinfer, device):
    """FA3 of 0.6 does not compile for FP8, and "auto" is "fa3" from the constructor on."""
    wrapper = make(flashinfer, "fa3")
    plan_flat(wrapper, csr([5, 7]))
    assert taken_by(wrapper) == "fp8kv"


def test_a_wrapper_goes_from_dtype_to_dtype(flashinfer, device):
    wrapper = make(flashinfer)
    for kv, expected in [(E4M3, "fp8kv"), (BF16, "fa3"), (E5M2, "fp8kv"), (BF16, "fa3")]:
        plan_flat(wrapper, csr([5, 7]), kv=kv)
        assert taken_by(wrapper) == expected
        module = wrapper._cached_module
        before = len(module.runs)
        wrapper.run(*tensors(kv=kv))
        assert len(module.runs) == before + 1


def test_the_workspace_is_new_once(flashinfer, device):
    """The wrapper keeps one integer workspace, and with it what a captured graph has fixed."""
    wrapper = make(flashinfer)
    for lengths in ([5, 7], [9, 9]):
        plan_flat(wrapper, csr(lengths))
    forgotten = device.module("fp8kv", E4M3, 64).forgotten
    assert list(map(id, forgotten)) == [id(wrapper._int_workspace_buffer)]


def test_what_sglang_sets_before_a_replay_counts(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))
    wrapper._causal, wrapper._sm_scale = True, 0.25
    wrapper.run(*tensors())
    args = device.module("fp8kv", E4M3, 64).runs[-1]
    assert args[10:14] == (1, 8, 1, 0.25)


def test_scales_are_refused_where_nobody_applies_them(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]), kv=BF16)
    call = tensors(kv=BF16)
    wrapper.run(*call, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None)
    for scale in ("ckv_scale", "ckv_scale_arr", "kpe_scale"):
        assert sentence(wrapper.run, *call, **{scale: torch.ones(64, 1, 4)}) == (
            "ckv_scale, ckv_scale_arr and kpe_scale need a plan with an FP8 kv_data_type."
        )
    assert len(wrapper._cached_module.runs) == 1


def test_profiler(flashinfer, device):
    assert sentence(plan_flat, make(flashinfer), csr([5]), profiler=True) == (
        "use_profiler=True is not supported with an FP8 KV cache."
    )


def test_backend_without_a_plan(flashinfer, device):
    assert sentence(plan_flat, make(flashinfer, "cutlass"), csr([5])) == (
        "backend='auto', 'fa2' or 'fa3' is supported with an FP8 KV cache, got 'cutlass'."
    )


@pytest.mark.parametrize("index", range(4))
def test_metadata_of_another_form(flashinfer, device, index):
    name = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")[index]
    metadata = list(csr([5, 7]))
    metadata[index] = metadata[index].long()
    said = sentence(plan_flat, make(flashinfer), metadata)
    assert said.startswith(f"{name} must be a contiguous torch.int32 vector, got torch.int64 of")
    metadata[index] = metadata[index].int().to("meta")
    assert sentence(plan_flat, make(flashinfer), metadata) == (
        f"{name} must be on the CPU or the wrapper's device cpu, got meta."
    )
    assert device.modules == {}


def test_more_pages_than_tokens_need(flashinfer, device):
    """SGLang 0.5.9's draft steps plan with the lengths before the step."""
    qo_indptr, kv_indptr, kv_indices, kv_len = csr([6, 8])
    plan_flat(make(flashinfer), (qo_indptr, kv_indptr, kv_indices, kv_len - 1))
    (plan,) = device.module("fp8kv", E4M3, 64).plans
    assert plan[4].tolist() == [0, 6, 14] and plan[5].tolist() == [5, 7]


def test_buffers_of_a_graph(flashinfer, device):
    wrapper, buffers = graph_wrapper(flashinfer, batch=2, pages=10)
    assert sentence(plan_flat, wrapper, csr([5, 7])) == (
        "kv_indices must fit the CUDA graph's buffer of 10 entries, got 12."
    )
    assert sentence(plan_flat, wrapper, csr([5])) == (
        "qo_indptr must fit the CUDA graph's buffer of 3 entries, got 2."
    )
    wrapper._kv_indices_buf = buffers["kv_indices"].long()
    assert sentence(plan_flat, wrapper, csr([5, 4])).startswith(
        "The CUDA graph's kv_indices must be a contiguous torch.int32 vector, got torch.int64"
    )
    wrapper._kv_indices_buf = buffers["kv_indices"].to("meta")
    assert sentence(plan_flat, wrapper, csr([5, 4])) == (
        "The CUDA graph's kv_indices must be on the wrapper's device cpu, got meta."
    )
    assert device.modules == {} and not any(buffer.any() for buffer in buffers.values())


def test_a_refused_plan_leaves_the_plan_before_it(flashinfer, device):
    wrapper, buffers = graph_wrapper(flashinfer, batch=2, pages=20)
    plan_flat(wrapper, csr([5, 7]))
    attributes = dict(vars(wrapper))
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    with pytest.raises(ValueError):
        plan_flat(wrapper, csr([50, 7]), q=FP16)
    assert vars(wrapper) == attributes
    assert all(torch.equal(buffers[name], kept[name]) for name in kept)
