"""A CPU stand-in for flashinfer and mla_fp8kv: the same calls, attention in float32."""

import os
import types

import torch
from mla_bench.case import attention


class Module:
    """What a compiled module is to the harness: an identity."""


_MODULES = {}


def module(kv_dtype, loads_only=False):
    return _MODULES.setdefault((kv_dtype, loads_only), Module())


def _loads_only() -> bool:
    return "MLA_FP8KV_LOADS_ONLY" in os.environ


class Metadata:
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        self = cls()
        self.csr_fields = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        return self


class Wrapper:
    """Plans and runs like BatchMLAPagedAttentionWrapper; `broken` makes it return zeros."""

    broken = False
    auto_is_fa3 = False

    def __init__(self, workspace, backend):
        self._backend = backend

    def plan(self, *, metadata, kv_data_type, page_size, causal, query_layout, **_):
        assert query_layout == "split"
        if self._backend == "fa3" and kv_data_type == torch.float8_e5m2:
            raise RuntimeError("fa3 takes no e5m2\n(second line)")
        self.csr = metadata.csr_fields
        self.page_size, self.causal, self.kv_dtype = page_size, causal, kv_data_type
        # Like the build before it learned of it, the stand-in has no module for bits.
        self._cached_module = module(kv_data_type, _loads_only())
        if self._backend == "auto" and self.auto_is_fa3:
            self._cached_module = module("fa3")
        self._plan_info = [int(os.environ.get("MLA_FP8KV_SMEM_LIMIT", 0))]

    def run(self, *, query, kv_cache, out, ckv_scale_arr=None, **_):
        assert kv_cache[0].dtype == self.kv_dtype
        qo_indptr, kv_indptr, indices, kv_lens = self.csr
        for b, length in enumerate(kv_lens.tolist()):
            pages = indices[kv_indptr[b] : kv_indptr[b + 1]].long()
            ckv, kpe = (c.float()[pages].flatten(0, 1)[:length] for c in kv_cache)
            if ckv_scale_arr is not None:
                ckv = ckv * ckv_scale_arr[pages].flatten(0, 1)[:length].repeat_interleave(128, 1)
            rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
            q = torch.cat([part[rows] for part in query], -1).float()
            out[rows] = attention(q, torch.cat([ckv, kpe], -1), self.causal).to(out.dtype)
        if self.broken:
            out.zero_()
        return out


class FlatWrapper(Wrapper):
    """The same in the form of FlashInfer 0.6."""

    def plan(self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, **arguments):
        metadata = Metadata.csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        super().plan(metadata=metadata, query_layout="split", **arguments)

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, **arguments):
        return super().run(query=(q_nope, q_pe), kv_cache=(ckv_cache, kpe_cache), **arguments)


def packages(flat: bool = False) -> dict[str, types.ModuleType]:
    """Modules to put into sys.modules."""
    flashinfer, mla = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = FlatWrapper if flat else Wrapper
    if not flat:
        mla.MLAPlanMetadata = Metadata
    flashinfer.mla = mla
    ours, jit = types.ModuleType("mla_fp8kv"), types.ModuleType("mla_fp8kv.jit")
    jit.get_module = lambda kv_dtype, head_dim_kpe: module(kv_dtype, _loads_only())
    ours.jit = jit
    return {
        "flashinfer": flashinfer,
        "flashinfer.mla": mla,
        "mla_fp8kv": ours,
        "mla_fp8kv.jit": jit,
    }
