"""FlashInfer 0.6's hook: `BatchMLAPagedAttentionWrapper` is one class with flat arguments.

The patched `plan` and `run` come here when the KV dtype is FP8, whatever the wrapper's backend:
neither FA2 nor FA3 of 0.6 compiles for FP8. That wrapper checks nothing, so all checks are here.
What SGLang reads and writes on a wrapper itself is where upstream's plan() puts it.
"""

import torch

from . import capability, checks
from .planned import Fp8Plan


def plan(
    wrapper,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_len_arr,
    num_heads: int,
    head_dim_ckv: int,
    head_dim_kpe: int,
    page_size: int,
    causal: bool,
    sm_scale: float,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
    use_profiler: bool,
) -> None:
    """Plan for an FP8 cache, with the arguments of the wrapper's plan().

    ValueError says in one sentence what is not supported and leaves the plan before it in place.
    """
    if wrapper._backend not in ("fa2", "fa3"):  # what "auto" has become
        raise ValueError(
            "backend='auto', 'fa2' or 'fa3' is supported with an FP8 KV cache, "
            f"got '{wrapper._backend}'."
        )
    workspace = wrapper._float_workspace_buffer
    if reason := capability.unsupported_reason(
        capability=capability.compute_capability(workspace.device),
        q_data_type=q_data_type,
        output_dtype=q_data_type,
        head_dim_ckv=head_dim_ckv,
        head_dim_kpe=head_dim_kpe,
    ):
        raise ValueError(reason)
    if use_profiler:
        raise ValueError("use_profiler=True is not supported with an FP8 KV cache.")
    checks.workspace(workspace)
    checks.softmax_scale(sm_scale)
    checks.positive("num_heads", num_heads)
    checks.positive("page_size", page_size)
    metadata = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_len_arr": kv_len_arr,
    }
    for name, tensor in metadata.items():
        checks.metadata(name, tensor, wrapper.device)
    checks.indptr_lengths(qo_indptr, kv_indptr, kv_len_arr)
    host = {name: metadata[name].to("cpu") for name in ("qo_indptr", "kv_indptr", "kv_len_arr")}
    _check_pages(host["kv_indptr"], host["kv_len_arr"], page_size)
    if wrapper._use_cuda_graph:
        _check_graph_buffers(wrapper, metadata)

    planned = Fp8Plan(
        float_workspace=workspace,
        int_workspace=wrapper._int_workspace_buffer,
        pinned_workspace=wrapper._pin_memory_int_workspace_buffer,
        # The wrapper keeps it for life, and with it the graphs that were captured.
        int_workspace_is_new="_fp8_plan" not in vars(wrapper),
        **host,
        kv_indices=kv_indices,
        num_heads=num_heads,
        head_dim_ckv=head_dim_ckv,
        head_dim_kpe=head_dim_kpe,
        page_size=page_size,
        causal=causal,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
    )
    for name, tensor in metadata.items():
        buffer = f"_{name}_buf"
        if wrapper._use_cuda_graph:
            getattr(wrapper, buffer)[: len(tensor)].copy_(tensor, non_blocking=True)
        else:
            setattr(wrapper, buffer, tensor.to(wrapper.device, non_blocking=True))
    wrapper._fp8_plan = planned
    wrapper._cached_module = planned.module
    wrapper._plan_info = planned.plan_info
    wrapper._causal = causal
    wrapper._page_size = page_size
    wrapper._sm_scale = sm_scale


def run(
    wrapper,
    q_nope,
    q_pe,
    ckv_cache,
    kpe_cache,
    out,
    lse,
    return_lse: bool,
    return_lse_base_on_e: bool,
    ckv_scale,
    ckv_scale_arr,
    kpe_scale,
):
    """Run the wrapper's FP8 plan, with the arguments of its run(); scales of None mean 1.0."""
    planned = wrapper._fp8_plan
    tensors = (q_nope, q_pe, ckv_cache, kpe_cache)
    arguments = {
        "kv_indices": wrapper._kv_indices_buf,
        "out": out,
        "lse": lse,
        "return_lse": return_lse,
        "causal": wrapper._causal,
        "page_size": wrapper._page_size,
        "sm_scale": wrapper._sm_scale,
        "return_lse_base_on_e": return_lse_base_on_e,
        "ckv_scale": ckv_scale,
        "ckv_scale_arr": ckv_scale_arr,
        "kpe_scale": kpe_scale,
        "in_cuda_graph": wrapper._use_cuda_graph,
    }
    result = planned.run_at_once(*tensors, **arguments)
    if result is not None:
        return result
    if ckv_scale is not None and ckv_scale_arr is not None:
        raise ValueError("ckv_scale or ckv_scale_arr is supported, got both.")
    planned.check_query(q_nope, q_pe)
    planned.check_cache(ckv_cache, kpe_cache)
    return planned.run(*tensors, **arguments)


def _check_pages(kv_indptr, kv_len_arr, page_size: int) -> None:
    """A request may have more pages than its tokens need, as SGLang's draft steps do."""
    pages = kv_indptr.diff()[: kv_len_arr.numel()]
    needed = (kv_len_arr + page_size - 1) // page_size
    short = (pages < needed).nonzero()
    if len(short):
        request = int(short[0])
        raise ValueError(
            f"kv_indptr must give request {request} the {int(needed[request])} pages of its "
            f"{int(kv_len_arr[request])} tokens, got {int(pages[request])}."
        )


def _check_graph_buffers(wrapper, metadata: dict) -> None:
    """CUDA graphs read the buffers the wrapper was made with, which have to take the metadata."""
    buffers = {name: getattr(wrapper, f"_{name}_buf") for name in metadata}
    checks.graph_buffers(buffers)
    for name, buffer in buffers.items():
        if buffer.device != wrapper.device:
            raise ValueError(
                f"The CUDA graph's {name} must be on the wrapper's device {wrapper.device}, "
                f"got {buffer.device}."
            )
        checks.metadata(f"The CUDA graph's {name}", buffer, wrapper.device)
        size = metadata[name].numel()
        if buffer.numel() < size or (name != "kv_indices" and buffer.numel() > size):
            raise ValueError(
                f"{name} must fit the CUDA graph's buffer of {buffer.numel()} entries, got {size}."
            )
