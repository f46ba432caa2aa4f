"""A plan for an FP8 KV cache and its runs, the same on every FlashInfer base.

The hooks differ with FlashInfer's wrapper: `backend` on 0.7, `flat_wrapper` on 0.6. They read its
arguments and attributes, check the metadata that it does not check itself, and leave the rest here.
"""

import torch
from flashinfer.utils import MaskMode

from . import checks, jit

_MASK_MODES = {False: MaskMode.NON_CAUSAL.value, True: MaskMode.CAUSAL.value}


class Fp8Plan:
    """What plan() fixed: the module, its plan_info, and the tensors that run() has to get.

    Attributes:
        module: the `StagedModule` that computes.
        plan_info: what its plan() returned.
        check_query, check_cache: refuse a (left, right) pair of tensors that does not fit the plan.
        check_packed_query, check_packed_cache: the same for both parts in one tensor.
    """

    def __init__(
        self,
        *,
        float_workspace,
        int_workspace,
        pinned_workspace,
        int_workspace_is_new: bool,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        qo_indptr_host = qo_indptr.to("cpu")
        kv_indptr_host = kv_indptr.to("cpu")
        kv_len_host = kv_len_arr.to("cpu")
        batch = kv_len_host.numel()
        pages = int(kv_indptr_host[batch])
        if pages > kv_indices.numel():
            raise ValueError(
                f"kv_indices must hold the {pages} pages that kv_indptr names, "
                f"got {kv_indices.numel()}."
            )
        self.module = jit.get_module(kv_data_type, head_dim_kpe)
        if int_workspace_is_new:
            # Its address may be that of a freed workspace, whose captured graphs are gone with it.
            self.module.forget(int_workspace)
        self.plan_info = self.module.plan(
            float_workspace,
            int_workspace,
            pinned_workspace,
            qo_indptr_host,
            kv_indptr_host,
            kv_len_host,
            num_heads,
            head_dim_ckv,
            causal,
        )
        self._float_workspace = float_workspace
        self._int_workspace = int_workspace
        self._device = float_workspace.device
        self._q_data_type = q_data_type
        self._kv_data_type = kv_data_type
        self._query_tokens = int(qo_indptr_host[batch])

        def tensor_checks(names, rows, widths, dtype, dtype_name):
            return [
                checks.TensorCheck(name, (None, rows, width), dtype, self._device, dtype_name)
                for name, width in zip(names, widths, strict=True)
            ]

        widths = (head_dim_ckv + head_dim_kpe, head_dim_ckv, head_dim_kpe)
        names = ("query", "q_nope", "q_pe")
        self.check_packed_query, *pair = tensor_checks(
            names, num_heads, widths, q_data_type, "q_data_type"
        )
        self.check_query = checks.PairCheck(*pair)
        names = ("kv_cache", "ckv_cache", "kpe_cache")
        self.check_packed_cache, *pair = tensor_checks(
            names, page_size, widths, kv_data_type, "kv_data_type"
        )
        self.check_cache = checks.PairCheck(*pair)
        (self._check_out,) = tensor_checks(
            ("out",), num_heads, widths[1:2], q_data_type, "output_dtype"
        )

    def run_at_once(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        ckv_scale,
        ckv_scale_arr,
        kpe_scale,
        in_cuda_graph: bool,
        **arguments,
    ):
        """What run() would return, without its checks; None if they may have something to say.

        The module refuses what could make a launch read or write astray, in a microsecond and
        before it launches anything. Looked at here is what it cannot know.
        """
        try:
            tokens = q_nope.shape[0]
            if (
                q_nope.dtype is not self._q_data_type
                or ckv_cache.dtype is not self._kv_data_type
                or kpe_cache.dtype is not self._kv_data_type
                or not tokens
                or not (tokens >= self._query_tokens or in_cuda_graph)
                or not (ckv_scale is None or ckv_scale_arr is None)
            ):
                return None
            return self._launch(
                q_nope,
                q_pe,
                ckv_cache,
                kpe_cache,
                1.0 if ckv_scale is None else ckv_scale,
                ckv_scale_arr,
                1.0 if kpe_scale is None else kpe_scale,
                **arguments,
            )
        except Exception:
            # Whatever it is, run() says it better or meets it again.
            return None

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out,
        lse,
        ckv_scale,
        ckv_scale_arr,
        kpe_scale,
        in_cuda_graph: bool,
        **arguments,
    ):
        """Launch on the current stream; out, or (out, lse) with `return_lse`.

        Query and cache have passed `check_query` and `check_cache`; scales of None mean 1.0.
        Further arguments are those of `_launch`.
        """
        ckv_scale = checks.scale("ckv_scale", ckv_scale)
        kpe_scale = checks.scale("kpe_scale", kpe_scale)
        if ckv_scale_arr is not None:
            checks.scale_array(ckv_scale_arr, ckv_cache)
        shape = q_nope.shape
        # A CUDA graph's plan may be renewed behind this object, so its row count is not known here.
        if shape[0] < self._query_tokens and not in_cuda_graph:
            raise ValueError(
                f"q_nope must have at least the {self._query_tokens} planned query tokens, "
                f"got {shape[0]}."
            )
        if out is not None:
            self._check_out(out)
            if out.shape[0] != shape[0]:
                raise ValueError(
                    f"out must have the {shape[0]} query tokens of q_nope, got {out.shape[0]}."
                )
        if lse is not None:
            checks.lse(lse, tuple(shape[:2]), self._device)
        return self._launch(
            *(q_nope, q_pe, ckv_cache, kpe_cache, ckv_scale, ckv_scale_arr, kpe_scale),
            out=out,
            lse=lse,
            **arguments,
        )

    def _launch(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        ckv_scale,
        ckv_scale_arr,
        kpe_scale,
        *,
        kv_indices,
        out,
        lse,
        return_lse: bool,
        causal: bool,
        page_size: int,
        sm_scale: float,
        return_lse_base_on_e: bool,
    ):
        shape = q_nope.shape
        if out is None:
            out = torch.empty(shape, dtype=self._q_data_type, device=self._device)
        if lse is None and return_lse:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self._device)
        if shape[0]:
            self.module.run(
                self._float_workspace,
                self._int_workspace,
                self.plan_info,
                q_nope,
                q_pe,
                ckv_cache,
                kpe_cache,
                kv_indices,
                out,
                lse,
                _MASK_MODES[causal],
                shape[1],
                page_size,
                sm_scale,
                return_lse_base_on_e,
                ckv_scale,
                kpe_scale,
                ckv_scale_arr,
            )
        return (out, lse) if return_lse else out
