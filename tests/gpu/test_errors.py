"""Wrong use on a real device: the exact sentence, nothing written, and the wrapper still works."""

import pytest
import torch
from mla_cases import (
    Case,
    compare,
    is_ours,
    make_inputs,
    new_wrapper,
    plan,
    reference,
    run_planned,
)
from refusals import PLAN, RUN, Call

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def good():
    """A right call, its wrapper and what it computes."""
    import flashinfer.mla

    call = Call("cuda:0")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace, backend="fa2")
    call.do_plan(wrapper)
    assert is_ours(wrapper)
    return wrapper, call, call.do_run(wrapper).clone()


def require_usable(good) -> None:
    wrapper, call, expected = good
    call.tensors["out"].fill_(7)
    assert torch.equal(call.do_run(wrapper), expected)


@pytest.mark.parametrize("name", PLAN)
def test_plan(name, good):
    change, sentence = PLAN[name]
    call = Call("cuda:0")
    change(call)
    with pytest.raises(ValueError) as refusal:
        call.do_plan(good[0])
    assert str(refusal.value) == sentence
    require_usable(good)


@pytest.mark.parametrize("name", RUN)
def test_run(name, good):
    change, sentence = RUN[name]
    call = Call("cuda:0")
    out = call.tensors["out"]
    change(call)
    with pytest.raises(ValueError) as refusal:
        call.do_run(good[0])
    assert str(refusal.value) == sentence
    torch.cuda.synchronize()
    assert bool((out == 7).all())
    require_usable(good)


def test_cpu_tensors(good):
    for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out"):
        call = Call("cuda:0")
        call.tensors[name] = call.tensors[name].cpu()
        with pytest.raises(ValueError) as refusal:
            call.do_run(good[0])
        assert str(refusal.value) == f"{name} must be on the wrapper's device cuda:0, got cpu."
    require_usable(good)


def test_cpu_workspace():
    import flashinfer.mla

    call = Call("cpu")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace, backend="fa2")
    with pytest.raises(ValueError) as refusal:
        call.do_plan(wrapper)
    assert str(refusal.value) == (
        "MLA with an FP8 KV cache runs on CUDA devices of compute capability 8.0 or newer; "
        "float_workspace_buffer is on cpu."
    )


def test_float_workspace_too_small():
    import flashinfer.mla

    call = Call("cuda:0")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace[:1000], backend="auto")
    with pytest.raises(ValueError) as refusal:
        call.do_plan(wrapper)
    message = str(refusal.value)
    assert message.startswith("float_workspace_buffer must have at least ")
    assert message.endswith(" bytes for this plan, got 1000.")
    needed = int(message.split("at least ")[1].split()[0])
    # The number in the sentence is enough.
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace[:needed], backend="auto")
    call.do_plan(wrapper)
    call.do_run(wrapper)


def test_negative_lengths_are_refused_behind_the_graph_too(good):
    wrapper, _, _ = good
    module = wrapper._cached_module
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    workspaces = (
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
    )
    with pytest.raises(ValueError, match=r"kv_len must be 0\.\.\d+, got -1"):
        length = torch.tensor([-1], dtype=torch.int32)
        module.plan(*workspaces, indptr, indptr, length, 8, 512, False)
    with pytest.raises(ValueError, match="qo_indptr must not be negative or decrease"):
        length = torch.tensor([1], dtype=torch.int32)
        module.plan(*workspaces, indptr.flip(0), indptr, length, 8, 512, False)
    require_usable(good)


def test_a_refused_plan_leaves_the_plan_before_it():
    case = Case((1, 2), (300, 4000), 16)
    inputs = make_inputs(case)
    wrapper = new_wrapper()
    plan(wrapper, inputs)
    wrong = make_inputs(Case((1, 2), (300, 4000), 16))
    wrong.kv_len.add_(1)
    with pytest.raises(ValueError):
        plan(wrapper, wrong)
    problems = compare(case, *run_planned(wrapper, inputs), *reference(inputs))
    assert not problems, problems
