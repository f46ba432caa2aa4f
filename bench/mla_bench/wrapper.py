"""FlashInfer's MLA wrapper, planned and called in the form of its release."""

from __future__ import annotations

import torch

from .case import QUERY_DTYPE, SM_SCALE, Case, PageTable
from .rows import HEAD_DIM_CKV, HEAD_DIM_KPE

Pair = tuple[torch.Tensor, torch.Tensor]


def is_flat() -> bool:
    """Whether plan() and run() take flat arguments only, as up to FlashInfer 0.6."""
    import flashinfer.mla

    return not hasattr(flashinfer.mla, "MLAPlanMetadata")


def plan(case: Case, backend: str, kv_dtype: torch.dtype, table: PageTable):
    """A planned `BatchMLAPagedAttentionWrapper` for the case on the given page table."""
    import flashinfer.mla

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(case.pools.workspace(), backend=backend)
    metadata = (case.qo_indptr, table.indptr, table.indices, case.kv_lens)
    if is_flat():
        form = dict(
            zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), metadata, strict=True)
        )
    else:
        form = {
            "metadata": flashinfer.mla.MLAPlanMetadata.csr(*metadata),
            "query_layout": "split",
            "kv_cache_layout": "split",
        }
    wrapper.plan(
        num_heads=case.row.heads,
        head_dim_ckv=HEAD_DIM_CKV,
        head_dim_kpe=HEAD_DIM_KPE,
        page_size=table.page_size,
        causal=case.row.causal,
        sm_scale=SM_SCALE,
        q_data_type=QUERY_DTYPE,
        kv_data_type=kv_dtype,
        **form,
    )
    return wrapper


def tensors(query: Pair, kv_cache: Pair) -> dict:
    """The keyword arguments of run() for a query (q_nope, q_pe) and a cache (ckv, kpe)."""
    if is_flat():
        names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
        return dict(zip(names, (*query, *kv_cache), strict=True))
    return {"query": query, "kv_cache": kv_cache}
