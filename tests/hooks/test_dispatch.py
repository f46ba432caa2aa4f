"""Who takes a plan, with which arguments, and what upstream keeps."""

import pytest
import torch
from calls import BF16, E4M3, E5M2, FP16, csr, make, plan_flat, tensors

OURS = "Fp8KvBackend"
FA2 = "_BatchMLAPagedAttentionFa2Backend"
FA3 = "_BatchMLAPagedAttentionFa3Backend"


def taken_by(wrapper):
    return type(wrapper._planned_backend).__name__


@pytest.mark.parametrize("sm", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("backend", ["auto", "fa2"])
@pytest.mark.parametrize("kv", [E4M3, E5M2])
@pytest.mark.parametrize("q", [BF16, FP16])
def test_fp8_reaches_our_kernels_on_every_gpu(flashinfer, device, sm, backend, kv, q):
    device.sm = sm
    wrapper = make(flashinfer, backend)
    plan_flat(wrapper, csr([5, 7]), q=q, kv=kv)
    assert taken_by(wrapper) == OURS
    assert list(device.modules) == [("fp8kv", kv, 64)]
    assert wrapper._backend == "fa2"


def test_sixteen_bit_kv_stays_upstream(flashinfer, device):
    for sm, backend, expected in [
        ((9, 0), "auto", FA3),
        ((9, 0), "fa2", FA2),
        ((8, 6), "auto", FA2),
        ((12, 0), "auto", FA2),
    ]:
        device.sm = sm
        wrapper = make(flashinfer, backend)
        plan_flat(wrapper, csr([5, 7]), kv=BF16)
        assert taken_by(wrapper) == expected


def test_explicit_fa3_stays_upstream_and_asks_for_scales(flashinfer, device):
    wrapper = make(flashinfer, "fa3")
    plan_flat(wrapper, csr([5, 7]))
    assert taken_by(wrapper) == FA3
    with pytest.raises(ValueError, match="Exactly one of ckv_scale or ckv_scale_arr is required"):
        wrapper.run(*tensors())
    wrapper.run(*tensors(), ckv_scale=2.0, kpe_scale=3.0)
    (module,) = device.modules.values()
    assert module.runs[-1][15:18] == (2.0, 3.0, None)


@pytest.mark.parametrize("backend, expected", [("auto", FA3), ("fa2", FA2)])
def test_profiler_stays_upstream_on_sm90(flashinfer, device, backend, expected):
    wrapper = make(flashinfer, backend)
    plan_flat(wrapper, csr([5, 7]), profiler=True)
    assert taken_by(wrapper) == expected


def test_auto_table_can_name_fa3_and_default_scales_hold_there(flashinfer, device, monkeypatch):
    import mla_fp8kv.capability

    monkeypatch.setattr(mla_fp8kv.capability, "SM90_AUTO", ((0, "mla_fp8kv"), (2048, "fa3")))
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))
    assert taken_by(wrapper) == OURS
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([300], [256]), causal=True)
    assert taken_by(wrapper) == "Fa3DefaultScales"
    wrapper.run(*tensors(256))
    module = device.module(*next(key for key in device.modules if key[0] == "fa3"))
    assert module.runs[-1][15:18] == (1.0, 1.0, None)
    # FP16 queries and e5m2 are beyond upstream's FP8 path, so the table does not apply to them.
    for q, kv in [(FP16, E4M3), (BF16, E5M2)]:
        wrapper = make(flashinfer)
        plan_flat(wrapper, csr([300], [256]), causal=True, q=q, kv=kv)
        assert taken_by(wrapper) == OURS


def test_a_graph_keeps_its_backend_whatever_the_table_says(flashinfer, device, monkeypatch):
    import mla_fp8kv.capability

    wrapper, _ = graph_wrapper(flashinfer, batch=1, pages=1000)
    plan_flat(wrapper, csr([5]))
    monkeypatch.setattr(mla_fp8kv.capability, "SM90_AUTO", ((0, "fa3"),))
    plan_flat(wrapper, csr([900]))
    assert taken_by(wrapper) == OURS


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
    plan_flat(wrapper, metadata, heads=12, causal=True)
    assert list(map(id, module.forgotten)) == [id(args[1]), id(wrapper._int_workspace_buffer)]


@pytest.mark.parametrize("form", ["csr-packed", "csr-split", "dense-split"])
def test_canonical_metadata(flashinfer, device, form):
    from flashinfer.mla import MLAPlanMetadata

    wrapper = make(flashinfer)
    qo_indptr, kv_indptr, kv_indices, kv_len = csr([5, 7], page_size=4)
    if form.startswith("csr"):
        metadata = MLAPlanMetadata.csr(qo_indptr, kv_indptr, kv_indices, kv_len)
    else:
        metadata = MLAPlanMetadata.dense(qo_indptr, kv_indices.view(2, 2), kv_len)
    layout = form.split("-")[1]
    wrapper.plan(
        metadata=metadata,
        num_heads=8,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=4,
        causal=False,
        sm_scale=0.1,
        q_data_type=BF16,
        kv_data_type=E4M3,
        query_layout=layout,
        kv_cache_layout=layout,
        lse_mode="basee",
    )
    assert taken_by(wrapper) == OURS
    split = tensors(page_size=4)
    query, cache = split[:2], split[2:]
    if layout == "packed":
        query = torch.zeros(2, 8, 576, dtype=BF16)
        cache = torch.zeros(64, 4, 576, dtype=torch.uint8).view(E4M3)
    out, lse = wrapper.run(query=query, kv_cache=cache, return_lse=True, return_lse_base_on_e=True)
    args = device.module("fp8kv", E4M3, 64).runs[-1]
    assert [tuple(tensor.shape) for tensor in args[3:7]] == [
        (2, 8, 512),
        (2, 8, 64),
        (64, 4, 512),
        (64, 4, 64),
    ]
    assert args[8] is out and args[9] is lse and args[14] is True
    assert args[10:14] == (0, 8, 4, 0.1)


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
    assert taken_by(wrapper) == OURS
    wrapper.run(*tensors(len(q_lens) and sum(q_lens), heads, pages=96))
    assert len(device.module("fp8kv", E4M3, 64).runs) == bool(q_lens)


def test_these_batches_are_beyond_upstreams_planner(flashinfer, device):
    for kv_lens, q_lens, heads in [([], [], 8), ([4] * 20000, [1] * 20000, 8), ([70], [16], 12)]:
        with pytest.raises(ValueError):
            plan_flat(
                make(flashinfer, "fa2"), csr(kv_lens, q_lens), heads=heads, causal=True, kv=BF16
            )


def test_head_dim_kpe_0(flashinfer, device):
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]), kpe=0)
    wrapper.run(*tensors(kpe=0))
    assert len(device.module("fp8kv", E4M3, 0).runs) == 1


def graph_wrapper(flashinfer, batch, pages, backend="auto"):
    buffers = {
        "qo_indptr": torch.zeros(batch + 1, dtype=torch.int32),
        "kv_indptr": torch.zeros(batch + 1, dtype=torch.int32),
        "kv_indices": torch.zeros(pages, dtype=torch.int32),
        "kv_len_arr": torch.zeros(batch, dtype=torch.int32),
    }
    return make(flashinfer, backend, use_cuda_graph=True, **buffers), buffers


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
