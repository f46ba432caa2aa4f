"""FlashInfer 0.7's wrapper: who takes a plan, and what upstream keeps."""

import pytest
import torch
from calls import BF16, E4M3, E5M2, FP16, csr, graph_wrapper, make, plan_flat, taken_by, tensors
from flashinfer_base import planned_wrapper_only

pytestmark = planned_wrapper_only


@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_ours_goes_by_the_name_of_fa2(flashinfer, device, backend):
    """The wrapper keeps the integer workspace of a CUDA graph for that name."""
    wrapper = make(flashinfer, backend)
    plan_flat(wrapper, csr([5, 7]))
    assert type(wrapper._planned_backend).__name__ == "Fp8KvBackend"
    assert wrapper._backend == "fa2"


def test_each_eager_plan_has_a_new_workspace(flashinfer, device):
    wrapper = make(flashinfer)
    workspaces = []
    for _ in range(2):
        plan_flat(wrapper, csr([5, 7]))
        workspaces.append(wrapper._int_workspace_buffer)
    assert workspaces[0] is not workspaces[1]
    forgotten = device.module("fp8kv", E4M3, 64).forgotten
    assert list(map(id, forgotten)) == list(map(id, workspaces))


def test_explicit_fa3_stays_upstream_and_asks_for_scales(flashinfer, device):
    wrapper = make(flashinfer, "fa3")
    plan_flat(wrapper, csr([5, 7]))
    assert taken_by(wrapper) == "fa3"
    with pytest.raises(ValueError, match="Exactly one of ckv_scale or ckv_scale_arr is required"):
        wrapper.run(*tensors())
    wrapper.run(*tensors(), ckv_scale=2.0, kpe_scale=3.0)
    (module,) = device.modules.values()
    assert module.runs[-1][15:18] == (2.0, 3.0, None)


@pytest.mark.parametrize("backend, expected", [("auto", "fa3"), ("fa2", "fa2")])
def test_profiler_stays_upstream_on_sm90(flashinfer, device, backend, expected):
    wrapper = make(flashinfer, backend)
    plan_flat(wrapper, csr([5, 7]), profiler=True)
    assert taken_by(wrapper) == expected


def test_auto_table_can_name_fa3_and_default_scales_hold_there(flashinfer, device, monkeypatch):
    import mla_fp8kv.capability

    monkeypatch.setattr(mla_fp8kv.capability, "SM90_AUTO", ((0, "mla_fp8kv"), (2048, "fa3")))
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([5, 7]))
    assert taken_by(wrapper) == "fp8kv"
    wrapper = make(flashinfer)
    plan_flat(wrapper, csr([300], [256]), causal=True)
    assert type(wrapper._planned_backend).__name__ == "Fa3DefaultScales"
    wrapper.run(*tensors(256, pages=300))
    module = device.module(*next(key for key in device.modules if key[0] == "fa3"))
    assert module.runs[-1][15:18] == (1.0, 1.0, None)
    # FP16 queries and e5m2 are beyond upstream's FP8 path, so the table does not apply to them.
    for q, kv in [(FP16, E4M3), (BF16, E5M2)]:
        wrapper = make(flashinfer)
        plan_flat(wrapper, csr([300], [256]), causal=True, q=q, kv=kv)
        assert taken_by(wrapper) == "fp8kv"


def test_a_graph_keeps_its_backend_whatever_the_table_says(flashinfer, device, monkeypatch):
    import mla_fp8kv.capability

    wrapper, _ = graph_wrapper(flashinfer, batch=1, pages=1000)
    plan_flat(wrapper, csr([5]))
    monkeypatch.setattr(mla_fp8kv.capability, "SM90_AUTO", ((0, "fa3"),))
    plan_flat(wrapper, csr([900]))
    assert taken_by(wrapper) == "fp8kv"


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
    assert taken_by(wrapper) == "fp8kv"
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


def test_these_batches_are_beyond_upstreams_planner(flashinfer, device):
    for kv_lens, q_lens, heads in [([], [], 8), ([4] * 20000, [1] * 20000, 8), ([70], [16], 12)]:
        with pytest.raises(ValueError):
            plan_flat(
                make(flashinfer, "fa2"), csr(kv_lens, q_lens), heads=heads, causal=True, kv=BF16
            )


def test_profiler_off_sm90(flashinfer, device):
    device.sm = (8, 9)
    with pytest.raises(ValueError) as refusal:
        make(flashinfer, "fa2").plan(
            *csr([5]), 8, 512, 64, 1, False, 0.1, torch.bfloat16, E4M3, True
        )
    assert str(refusal.value) == (
        "use_profiler=True is supported with an FP8 KV cache on SM90 only, by backend='fa3'."
    )


def test_explicit_fa3_keeps_upstreams_refusals(flashinfer, device):
    with pytest.raises(ValueError, match="FP8 kv_data_type for MLA currently only supports"):
        plan_flat(make(flashinfer, "fa3"), csr([5]), q=torch.float16)
    with pytest.raises(ValueError, match="not supported by the fa3 backend"):
        plan_flat(make(flashinfer, "fa3"), csr([5]), kv=torch.float8_e5m2)


def test_a_flat_plan_must_name_the_pages_it_has(flashinfer, device):
    """Flat metadata of other batch sizes passes upstream's check, so the end of it is looked at."""
    qo_indptr, kv_indptr, kv_indices, kv_len = csr([5, 7])
    longer = torch.cat([qo_indptr, qo_indptr[-1:]])
    plan_flat(make(flashinfer), (longer, kv_indptr, kv_indices, kv_len))
    with pytest.raises(ValueError) as refusal:
        plan_flat(make(flashinfer), (longer, kv_indptr, kv_indices[:10], kv_len))
    assert str(refusal.value) == "kv_indices must hold the 12 pages that kv_indptr names, got 10."
