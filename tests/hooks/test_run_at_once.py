"""The short way of run(): without the checks in Python, and with the same call as the long one."""

import pytest
import torch
from calls import BF16, csr, graph_wrapper, make, plan_flat, tensors
from flashinfer_base import planned_wrapper_only
from mla_fp8kv import checks
from refusals import Call


def forbid(monkeypatch):
    """Makes every check of a tensor in Python fail."""

    def check(self, value):
        raise AssertionError(f"{self.name} was checked in Python")

    monkeypatch.setattr(checks.TensorCheck, "__call__", check)


def planned_call(flashinfer, **options):
    call = Call("cpu", options=options)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace, backend="auto")
    call.do_plan(wrapper)
    return wrapper, call


def flat(arguments):
    """Arguments of the module in a form that can be compared."""
    return [
        (one.data_ptr(), one.shape, one.stride(), one.dtype)
        if isinstance(one, torch.Tensor)
        else list(one)
        if hasattr(one, "__iter__")
        else one
        for one in arguments
    ]


OPTIONS = {
    "none": {},
    "scales": {"ckv_scale": 0.5, "kpe_scale": 2},
    "group scales": {"ckv_scale_arr": torch.ones(64, 4, 4), "kpe_scale": 2.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_ways_make_the_same_call(flashinfer, bound, monkeypatch, name):
    from mla_fp8kv import planned

    wrapper, call = planned_call(flashinfer, **OPTIONS[name])
    with monkeypatch.context() as patch:
        forbid(patch)
        assert call.do_run(wrapper) is call.tensors["out"]
    with monkeypatch.context() as patch:
        patch.setattr(planned.Fp8Plan, "run_at_once", lambda *_, **__: None)
        assert call.do_run(wrapper) is call.tensors["out"]
    short, long = bound.runs
    assert flat(short) == flat(long)


def test_outputs_are_made_where_none_are_given(flashinfer, bound, monkeypatch):
    wrapper, call = planned_call(flashinfer)
    del call.tensors["out"]
    forbid(monkeypatch)
    out = call.do_run(wrapper)
    assert (out.shape, out.dtype, out.device.type) == ((2, 8, 512), BF16, "cpu")


@planned_wrapper_only
@pytest.mark.parametrize("mode", ["base2", "basee"])
def test_a_planned_lse_is_on_the_short_way(flashinfer, bound, monkeypatch, mode):
    call = Call("cpu", options={"return_lse": True, "return_lse_base_on_e": mode == "basee"})
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(call.workspace, backend="auto")
    metadata = [call.plan.pop(name) for name in ("qo_indptr", "kv_indptr", "kv_indices")]
    metadata.append(call.plan.pop("kv_len_arr"))
    wrapper.plan(
        metadata=flashinfer.mla.MLAPlanMetadata.csr(*metadata),
        query_layout="split",
        kv_cache_layout="split",
        lse_mode=mode,
        **call.plan,
    )
    forbid(monkeypatch)
    out, lse = call.do_run(wrapper)
    assert out is call.tensors["out"]
    assert (lse.shape, lse.dtype) == ((2, 8), torch.float32)
    assert bound.runs[-1][9] is lse and bound.runs[-1][14] == (mode == "basee")


def test_only_a_graph_may_run_fewer_tokens_than_planned(flashinfer, device):
    """Its plan is renewed behind the wrapper."""
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))
    module = device.module("fp8kv", torch.float8_e4m3fn, 64)
    with pytest.raises(ValueError, match="at least the 2 planned query tokens, got 1"):
        wrapper.run(*tensors(tokens=1))
    assert module.runs == []
    wrapper, _ = graph_wrapper(flashinfer, 2, 20)
    plan_flat(wrapper, csr([5, 7]))
    wrapper.run(*tensors(tokens=1))
    assert len(module.runs) == 1


def test_no_queries_launch_nothing(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7], q_lens=[0, 0]))
    out = wrapper.run(*tensors(tokens=0))
    assert out.shape == (0, 8, 512)
    assert device.module("fp8kv", torch.float8_e4m3fn, 64).runs == []


def test_a_failed_launch_is_said_as_it_is(flashinfer, device, monkeypatch):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))

    def run(*_):
        raise RuntimeError("launch of the FP8 MLA kernel failed: out of memory.")

    monkeypatch.setattr(device.module("fp8kv", torch.float8_e4m3fn, 64), "run", run)
    with pytest.raises(RuntimeError) as failure:
        wrapper.run(*tensors())
    assert str(failure.value) == "launch of the FP8 MLA kernel failed: out of memory."
