"""Wrapper calls shared by the hook tests, in the forms that real callers use."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16


def make(flashinfer, backend="auto", **kwargs):
    # Since 0.7.4 upstream's FA2 and FA3 refuse a workspace that their plans may outgrow.
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 25, dtype=torch.uint8), backend=backend, **kwargs
    )


def csr(kv_lens, q_lens=None, page_size=1):
    """(qo_indptr, kv_indptr, kv_indices, kv_len_arr) of a batch."""
    kv_len = torch.tensor(kv_lens, dtype=torch.int32)
    q_len = torch.tensor(q_lens or [1] * len(kv_lens), dtype=torch.int32)

    def indptr(lengths):
        zero = torch.zeros(1, dtype=torch.int32)
        return torch.cat([zero, torch.cumsum(lengths, 0, dtype=torch.int32)])

    kv_indptr = indptr((kv_len + page_size - 1) // page_size)
    indices = torch.arange(int(kv_indptr[-1]), dtype=torch.int32)
    return indptr(q_len), kv_indptr, indices, kv_len


def plan_flat(
    wrapper,
    metadata,
    *,
    heads=8,
    kpe=64,
    page_size=1,
    causal=False,
    q=BF16,
    kv=E4M3,
    profiler=False,
):
    """The flat positional call, word for word as SGLang 0.5.23 makes it."""
    extra = [True] if profiler else []
    wrapper.plan(*metadata, heads, 512, kpe, page_size, causal, 0.1, q, kv, *extra)


def tensors(tokens=2, heads=8, kpe=64, pages=64, page_size=1, q=BF16, kv=E4M3):
    """q_nope, q_pe, ckv, kpe: slices of one query array and of one pool stored as bytes."""
    query = torch.zeros(tokens, heads, 512 + kpe, dtype=q)
    pool = torch.zeros(pages, page_size, (512 + kpe) * kv.itemsize, dtype=torch.uint8).view(kv)
    return query[..., :512], query[..., 512:], pool[..., :512], pool[..., 512:]


def taken_by(wrapper):
    """ "fp8kv" for our module, else "fa2" or "fa3": the first part of the module's key."""
    return wrapper._cached_module.key[0]


def graph_wrapper(flashinfer, batch, pages, backend="auto"):
    """A wrapper for CUDA graphs, and its buffers by name."""
    buffers = {
        "qo_indptr": torch.zeros(batch + 1, dtype=torch.int32),
        "kv_indptr": torch.zeros(batch + 1, dtype=torch.int32),
        "kv_indices": torch.zeros(pages, dtype=torch.int32),
        "kv_len_arr": torch.zeros(batch, dtype=torch.int32),
    }
    return make(flashinfer, backend, use_cuda_graph=True, **buffers), buffers
