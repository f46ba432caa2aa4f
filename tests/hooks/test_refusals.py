"""Wrong input gets its sentence, reaches no module, and leaves the wrapper usable."""

import pytest
import torch
from calls import E4M3, csr, make, plan_flat
from flashinfer_base import FLAT
from refusals import PLAN, RUN, Call


def wrapper_of(flashinfer, call, backend):
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace, backend=backend)


# With "auto", upstream's other backends answer to a BMM scale mode.
PLANS = [
    (name, way) for name in PLAN for way in ("fa2", "auto") if (name, way) != ("BMM scales", "auto")
]


@pytest.mark.parametrize("name, backend", PLANS)
def test_plan(flashinfer, device, name, backend):
    change, sentence = PLAN[name]
    call, good = Call("cpu"), Call("cpu")
    wrapper = wrapper_of(flashinfer, call, backend)
    good.do_plan(wrapper)
    module = device.module("fp8kv", E4M3, 64)
    change(call)
    with pytest.raises(ValueError) as refusal:
        call.do_plan(wrapper)
    assert str(refusal.value) == sentence
    assert len(module.plans) == 1
    good.do_run(wrapper)
    good.do_plan(wrapper)
    good.do_run(wrapper)
    assert (len(module.plans), len(module.runs)) == (2, 2)


@pytest.mark.parametrize("name", RUN)
def test_run(flashinfer, bound, name):
    change, sentence = RUN[name]
    call, good = Call("cpu"), Call("cpu")
    wrapper = wrapper_of(flashinfer, call, "auto")
    call.do_plan(wrapper)
    change(call)
    with pytest.raises(ValueError) as refusal:
        call.do_run(wrapper)
    assert str(refusal.value) == sentence
    assert bound.runs == [] and bound.binding.launched() == 0
    good.do_run(wrapper)
    assert len(bound.runs) == 1 and bound.binding.launched() > 0


def test_every_sentence_is_one_sentence():
    for _, sentence in [*PLAN.values(), *RUN.values()]:
        assert sentence.endswith(".") and ". " not in sentence and "\n" not in sentence


@pytest.mark.parametrize("sm", [(7, 0), (7, 5)])
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_older_gpus(flashinfer, device, sm, backend):
    device.sm = sm
    with pytest.raises(ValueError) as refusal:
        plan_flat(make(flashinfer, backend), csr([5]))
    assert str(refusal.value) == (
        "MLA with an FP8 KV cache needs compute capability 8.0 or newer, "
        f"this device has {sm[0]}.{sm[1]}."
    )


# The constructor of 0.6 needs a GPU to turn "auto" into a backend.
@pytest.mark.parametrize("backend", ["fa2"] + ["auto"] * (not FLAT))
def test_cpu(flashinfer, unpinned, backend):
    """No pretended device here: the workspace is on the CPU and that is what is said."""
    with pytest.raises(ValueError) as refusal:
        plan_flat(make(flashinfer, backend), csr([5]))
    assert str(refusal.value) == (
        "MLA with an FP8 KV cache runs on CUDA devices of compute capability 8.0 or newer; "
        "float_workspace_buffer is on cpu."
    )


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse"])
def test_tensors_on_another_device(flashinfer, bound, name):
    call = Call("cpu")
    wrapper = wrapper_of(flashinfer, call, "auto")
    call.do_plan(wrapper)
    if name == "lse":
        call.options.update(return_lse=True, lse=torch.empty(2, 8, device="meta"))
    else:
        call.tensors[name] = call.tensors[name].to("meta")
    with pytest.raises(ValueError) as refusal:
        call.do_run(wrapper)
    assert str(refusal.value) == f"{name} must be on the wrapper's device cpu, got meta."
    assert bound.runs == [] and bound.binding.launched() == 0


def test_strided_workspace(flashinfer, device):
    workspace = torch.empty(4096, 2, dtype=torch.uint8)[:, 0]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    with pytest.raises(ValueError) as refusal:
        plan_flat(wrapper, csr([5]))
    assert str(refusal.value) == "float_workspace_buffer must be contiguous, got strides (2,)."


def test_misaligned_workspace(flashinfer, device):
    workspace = torch.empty(4096, dtype=torch.uint8)[4:]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    with pytest.raises(ValueError) as refusal:
        plan_flat(wrapper, csr([5]))
    assert str(refusal.value) == (
        "float_workspace_buffer must start on a 16-byte boundary, got an address 4 bytes past one."
    )


def test_graph_without_buffers(flashinfer, device):
    wrapper = make(flashinfer, use_cuda_graph=True, qo_indptr=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError) as refusal:
        plan_flat(wrapper, csr([5]))
    assert str(refusal.value) == (
        "use_cuda_graph=True needs the reserved buffers qo_indptr, kv_indptr, kv_indices and "
        "kv_len_arr, got none for kv_indptr, kv_indices, kv_len_arr."
    )
