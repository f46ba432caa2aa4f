"""Who takes a plan and with which arguments, on every base."""

import pytest
import torch
from calls import BF16, E4M3, E5M2, FP16, csr, graph_wrapper, make, plan_flat, taken_by, tensors


@pytest.mark.parametrize("sm", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("backend", ["auto", "fa2"])
@pytest.mark.parametrize("kv", [E4M3, E5M2])
@pytest.mark.parametrize("q", [BF16, FP16])
def test_fp8_reaches_our_kernels_on_every_gpu(flashinfer, device, sm, backend, kv, q):
    device.sm = sm
    wrapper = make(flashinfer, backend)
    plan_flat(wrapper, csr([5, 7]), q=q, kv=kv)
    assert taken_by(wrapper) == "fp8kv"
    assert list(device.modules) == [("fp8kv", kv, 64)]


def test_sixteen_bit_kv_stays_upstream(flashinfer, device):
    for sm, backend, expected in [
        ((9, 0), "auto", "fa3"),
        ((9, 0), "fa2", "fa2"),
        ((8, 6), "auto", "fa2"),
        ((12, 0), "auto", "fa2"),
    ]:
        device.sm = sm
        wrapper = make(flashinfer, backend)
        plan_flat(wrapper, csr([5, 7]), kv=BF16)
        assert taken_by(wrapper) == expected


def test_plan_arguments_of_the_flat_form(flashinfer, device):
    wrapper = make(flashinfer)
    metadata = csr([5, 0, 7], [2, 1, 3])
    plan_flat(wrapper, metadata, heads=12, causal=True)
    module = device.module("fp8kv", E4M3, 64)
    (args,) = module.plans
    assert args[0] is wrapper._float_workspace_buffer
    assert args[1] is wrapper._int_workspace_buffer
    assert args[2] is wrapper._pin_memory_int_workspace_buffer
    for given, want in zip(args[3:6], (metadata[0], metadata[1], metadata[3]), strict=True):
        assert given.device.type == "cpu" and torch.equal(given, want)
    assert args[6:] == (12, 512, True)
    assert wrapper._plan_info == [1]
    assert wrapper._cached_module is module
    assert list(map(id, module.forgotten)) == [id(args[1])]


def test_run_arguments_of_the_flat_form(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7], [1, 3]), causal=True)
    q_nope, q_pe, ckv, kpe = tensors(4)
    out = torch.empty(4, 8, 512, dtype=BF16)
    assert wrapper.run(q_nope, q_pe, ckv, kpe, out=out) is out
    args = device.module("fp8kv", E4M3, 64).runs[-1]
    assert args[0] is wrapper._float_workspace_buffer
    assert args[1] is wrapper._int_workspace_buffer
    assert args[2] == wrapper._plan_info
    for given, want in zip(args[3:7], (q_nope, q_pe, ckv, kpe), strict=True):
        assert given is want
    assert args[7] is wrapper._kv_indices_buf
    assert args[8] is out and args[9] is None
    assert args[10:] == (1, 8, 1, 0.1, False, 1.0, 1.0, None)


def test_run_makes_the_results_it_is_not_given(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))
    out, lse = wrapper.run(*tensors(), return_lse=True)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 8, 512), BF16, True)
    assert (lse.shape, lse.dtype) == ((2, 8), torch.float32)
    given = torch.empty(2, 8)
    assert wrapper.run(*tensors(), lse=given, return_lse=True)[1] is given


@pytest.mark.parametrize(
    "scales, expected",
    [
        ({}, (1.0, 1.0, False)),
        ({"ckv_scale": 1.0, "kpe_scale": 1.0}, (1.0, 1.0, False)),
        ({"ckv_scale": 0.06}, (0.06, 1.0, False)),
        ({"kpe_scale": 4}, (1.0, 4.0, False)),
        ({"ckv_scale": 0.5, "kpe_scale": 2.0}, (0.5, 2.0, False)),
        ({"ckv_scale_arr": "array"}, (1.0, 1.0, True)),
        ({"ckv_scale_arr": "array", "kpe_scale": 2.0}, (1.0, 2.0, True)),
    ],
)
@pytest.mark.parametrize("kv", [E4M3, E5M2])
def test_scales(flashinfer, device, scales, expected, kv):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]), kv=kv)
    if "ckv_scale_arr" in scales:
        scales = {**scales, "ckv_scale_arr": torch.ones(64, 1, 4)}
    wrapper.run(*tensors(kv=kv), **scales)
    ckv, kpe, array = device.module("fp8kv", kv, 64).runs[-1][15:18]
    assert (ckv, kpe, array is not None) == expected


def test_dynamic_lse_of_the_flat_form_keeps_default_scales(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))
    wrapper.run(*tensors(), return_lse=True, return_lse_base_on_e=True)
    assert device.module("fp8kv", E4M3, 64).runs[-1][14:18] == (True, 1.0, 1.0, None)


@pytest.mark.parametrize("backend", ["auto", "fa2"])
@pytest.mark.parametrize(
    "kv_lens, q_lens, heads, causal",
    [
        ([], [], 8, False),  # upstream: "requires a nonempty batch"
        ([0] * 16, [1] * 16, 8, False),
        ([4] * 20000, [1] * 20000, 8, False),  # upstream: more than 16,384 work items
        ([70], [16], 12, True),  # upstream: "causal tile boundary is unsupported"
    ],
)
def test_limits_of_upstreams_planner_do_not_apply(
    flashinfer, device, backend, kv_lens, q_lens, heads, causal
):
    wrapper = make(flashinfer, backend)
    plan_flat(wrapper, csr(kv_lens, q_lens), heads=heads, causal=causal)
    assert taken_by(wrapper) == "fp8kv"
    wrapper.run(*tensors(len(q_lens) and sum(q_lens), heads, pages=96))
    assert len(device.module("fp8kv", E4M3, 64).runs) == bool(q_lens)


def test_head_dim_kpe_0(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]), kpe=0)
    wrapper.run(*tensors(kpe=0))
    assert len(device.module("fp8kv", E4M3, 0).runs) == 1


@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_cuda_graph_keeps_buffers_and_workspace(flashinfer, device, backend):
    wrapper, buffers = graph_wrapper(flashinfer, batch=2, pages=100, backend=backend)
    plan_flat(wrapper, csr([5, 7]))
    int_workspace = wrapper._int_workspace_buffer
    module = wrapper._cached_module
    plan_flat(wrapper, csr([40, 60]))
    assert wrapper._int_workspace_buffer is int_workspace
    assert wrapper._pin_memory_int_workspace_buffer.shape == int_workspace.shape
    assert wrapper._cached_module is module
    # What a captured graph has fixed is kept with its workspace; only a new one starts afresh.
    assert [given is int_workspace for given in module.forgotten] == [True]
    for name, attribute in [
        ("qo_indptr", "_qo_indptr_buf"),
        ("kv_indptr", "_kv_indptr_buf"),
        ("kv_indices", "_kv_indices_buf"),
        ("kv_len_arr", "_kv_len_arr_buf"),
    ]:
        assert getattr(wrapper, attribute) is buffers[name]
    assert buffers["kv_len_arr"].tolist() == [40, 60]
    assert buffers["kv_indices"].tolist() == list(range(100))


def test_graph_replay_as_sglang_plans_it(flashinfer, device):
    wrapper, _ = graph_wrapper(flashinfer, batch=2, pages=100)
    plan_flat(wrapper, csr([5, 7]))
    qo_indptr, kv_indptr, _, kv_len = csr([9, 30])
    wrapper._cached_module.plan(
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        qo_indptr,
        kv_indptr,
        kv_len,
        8,
        512,
        False,
    )
    wrapper.run(*tensors())
    args = device.module("fp8kv", E4M3, 64).runs[-1]
    assert args[1] is wrapper._int_workspace_buffer
    assert args[7] is wrapper._kv_indices_buf
