"""The planned-wrapper backend for FP8 KV caches, and the choice between it and upstream's.

`select_backend` is what the patched `BatchMLAPagedAttentionWrapper.plan` calls when the KV dtype is
FP8. Caches are [pages, page_size, 512] and [pages, page_size, 64 or 0] in float8_e4m3fn or
float8_e5m2, queries and output [tokens, heads, 512 (64 or 0)] in bfloat16 or float16.
"""

from dataclasses import fields

import torch
from flashinfer.mla._batch_mla._auto_policy import _BatchMLAPagedAttentionAutoBackend
from flashinfer.mla._batch_mla._backends._capabilities import (
    _BackendPlanUnsupportedError,
    plan_capability_rejection_reason,
)
from flashinfer.mla._batch_mla._backends._fa_common import _BatchMLAPagedAttentionFaBackendBase
from flashinfer.mla._batch_mla._backends.fa2_backend import _BatchMLAPagedAttentionFa2Backend
from flashinfer.mla._batch_mla._backends.fa3_backend import _BatchMLAPagedAttentionFa3Backend
from flashinfer.mla._batch_mla._contracts import MLAInputContract, _parse_structural_mla_input
from flashinfer.utils import MaskMode

from . import capability, checks, jit

_TWO_TENSORS = [torch.Tensor, torch.Tensor]


class Fp8InputContract(MLAInputContract):
    """Upstream's run contract, except that scales which are not given mean 1.0."""

    @classmethod
    def of(cls, contract: MLAInputContract) -> "Fp8InputContract":
        values = {field.name: getattr(contract, field.name) for field in fields(contract)}
        return cls(**{**values, "scale_mode": "kv-per-tensor"})

    def validate_run_options(self, *, ckv_scale, ckv_scale_arr, kpe_scale, **options) -> None:
        super().validate_run_options(
            ckv_scale=1.0 if ckv_scale is None and ckv_scale_arr is None else ckv_scale,
            ckv_scale_arr=ckv_scale_arr,
            kpe_scale=1.0 if kpe_scale is None else kpe_scale,
            **options,
        )


class Fp8KvBackend(_BatchMLAPagedAttentionFaBackendBase):
    """FA2's place in the wrapper, with the FP8 KV module behind it.

    It goes by the name "fa2" because the wrapper keeps the integer workspace of a CUDA graph from
    plan to plan for that name. Upstream's limits of work items, of causal tile boundaries and of
    empty batches come from its own planner and do not apply.
    """

    _plan_capabilities = _BatchMLAPagedAttentionFa2Backend._plan_capabilities

    def __init__(self, *, int_workspace_buffer=None, **arguments) -> None:
        super().__init__(int_workspace_buffer=int_workspace_buffer, **arguments)
        self._int_workspace_is_new = int_workspace_buffer is None

    @classmethod
    def preflight_plan_from_wrapper(cls, args) -> None:
        csr = args.csr()
        if reason := plan_capability_rejection_reason(args, cls._plan_capabilities):
            raise _BackendPlanUnsupportedError(reason)
        workspace = args._float_workspace_buffer
        if reason := capability.unsupported_reason(
            capability=capability.compute_capability(workspace.device),
            q_data_type=args.q_data_type,
            output_dtype=args.output_dtype,
            head_dim_ckv=args.head_dim_ckv,
            head_dim_kpe=args.head_dim_kpe,
        ):
            raise _BackendPlanUnsupportedError(reason)
        if args.use_profiler:
            raise _BackendPlanUnsupportedError(
                "use_profiler=True is supported with an FP8 KV cache on SM90 only, "
                "by backend='fa3'."
            )
        checks.workspace(workspace)
        # Flat metadata may be longer than the batch, as upstream allows, but never shorter.
        batch = csr.kv_len_arr.numel()
        for name, indptr in (("qo_indptr", csr.qo_indptr), ("kv_indptr", csr.kv_indptr)):
            if indptr.numel() < batch + 1:
                raise ValueError(
                    f"{name} must have batch + 1 = {batch + 1} entries, got {indptr.numel()}."
                )
        if args._use_cuda_graph:
            buffers = (
                ("qo_indptr", args._qo_indptr_buf, csr.qo_indptr, False),
                ("kv_indptr", args._kv_indptr_buf, csr.kv_indptr, False),
                ("kv_indices", args._kv_indices_buf, csr.kv_indices, True),
                ("kv_len_arr", args._kv_len_arr_buf, csr.kv_len_arr, False),
            )
            cls._validate_graph_metadata_buffers(workspace.device, buffers)
            missing = [name for name, buffer, _, _ in buffers if buffer is None]
            if missing:
                raise ValueError(
                    "use_cuda_graph=True needs the reserved buffers qo_indptr, kv_indptr, "
                    f"kv_indices and kv_len_arr, got none for {', '.join(missing)}."
                )

    def plan(
        self,
        *,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        output_dtype,
        scale_mode,
        use_profiler,
    ) -> None:
        module = jit.get_module(kv_data_type, head_dim_kpe)
        qo_indptr_host = qo_indptr.to("cpu")
        kv_indptr_host = kv_indptr.to("cpu")
        kv_len_host = kv_len_arr.to("cpu")
        pages = int(kv_indptr_host[kv_len_host.numel()])
        if pages > kv_indices.numel():
            raise ValueError(
                f"kv_indices must hold the {pages} pages that kv_indptr names, "
                f"got {kv_indices.numel()}."
            )
        if self._int_workspace_is_new:
            # Its address may be that of a freed workspace, whose captured graphs are gone with it.
            module.forget(self._int_workspace_buffer)
        plan_info, staged_bytes = module.plan_with_staged_workspace_bytes(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            qo_indptr_host,
            kv_indptr_host,
            kv_len_host,
            num_heads,
            head_dim_ckv,
            causal,
        )
        self._stage_metadata(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
        )
        self._cached_module = module
        self._plan_info = plan_info
        self._staged_int_workspace_bytes = staged_bytes
        self._causal = causal
        self._page_size = page_size
        self._sm_scale = sm_scale
        self._head_dim_ckv = head_dim_ckv
        self._q_data_type = q_data_type
        self._kv_data_type = kv_data_type
        self._mask_mode = (MaskMode.CAUSAL if causal else MaskMode.NON_CAUSAL).value
        self._query_tokens = int(qo_indptr_host[kv_len_host.numel()])
        widths = (head_dim_ckv + head_dim_kpe, head_dim_ckv, head_dim_kpe)
        names = ("query", "q_nope", "q_pe")
        self._query_checks = self._tensor_checks(
            names, num_heads, widths, q_data_type, "q_data_type"
        )
        names = ("kv_cache", "ckv_cache", "kpe_cache")
        self._cache_checks = self._tensor_checks(
            names, page_size, widths, kv_data_type, "kv_data_type"
        )
        (self._check_out,) = self._tensor_checks(
            ("out",), num_heads, widths[1:2], q_data_type, "output_dtype"
        )

    def _tensor_checks(self, names, rows, widths, dtype, dtype_name):
        return [
            checks.TensorCheck(name, (None, rows, width), dtype, self.device, dtype_name)
            for name, width in zip(names, widths, strict=True)
        ]

    def check_run_inputs(self, query: object, kv_cache: object) -> None:
        """Refuse queries and caches that the plan does not fit; called at the start of run()."""
        self._check_pair(query, *self._query_checks)
        self._check_pair(kv_cache, *self._cache_checks)

    @staticmethod
    def _check_pair(value, check_packed, check_left, check_right) -> None:
        if type(value) is tuple and list(map(type, value)) == _TWO_TENSORS:
            left, right = value
        else:  # packed, both forms at once, or malformed
            packed, split = _parse_structural_mla_input(value, name=check_packed.name)
            if split is None:
                check_packed(packed)
                return
            left, right = split
        check_left(left)
        check_right(right)
        if left.shape[0] != right.shape[0]:
            raise ValueError(
                f"{check_left.name} and {check_right.name} must have the same first extent, "
                f"got {left.shape[0]} and {right.shape[0]}."
            )

    def _run_generated_fa(
        self,
        *,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out,
        lse,
        return_lse,
        profiler_buffer,
        return_lse_base_on_e,
        ckv_scale,
        ckv_scale_arr,
        kpe_scale,
    ):
        ckv_scale = checks.scale("ckv_scale", ckv_scale)
        kpe_scale = checks.scale("kpe_scale", kpe_scale)
        if ckv_scale_arr is not None:
            checks.scale_array(ckv_scale_arr, ckv_cache)
        shape = q_nope.shape
        # A CUDA graph's plan may be renewed behind this object, so its row count is not known here.
        if shape[0] < self._query_tokens and not self._use_cuda_graph:
            raise ValueError(
                f"q_nope must have at least the {self._query_tokens} planned query tokens, "
                f"got {shape[0]}."
            )
        if out is None:
            out = torch.empty(shape, dtype=self._q_data_type, device=self.device)
        else:
            self._check_out(out)
            if out.shape[0] != shape[0]:
                raise ValueError(
                    f"out must have the {shape[0]} query tokens of q_nope, got {out.shape[0]}."
                )
        if lse is not None:
            checks.lse(lse, tuple(shape[:2]), self.device)
        elif return_lse:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        if shape[0]:
            self._cached_module.run(
                self._float_workspace_buffer,
                self._int_workspace_buffer,
                self._plan_info,
                q_nope,
                q_pe,
                ckv_cache,
                kpe_cache,
                self._kv_indices_buf,
                out,
                lse,
                self._mask_mode,
                shape[1],
                self._page_size,
                self._sm_scale,
                return_lse_base_on_e,
                ckv_scale,
                kpe_scale,
                ckv_scale_arr,
            )
        return (out, lse) if return_lse else out


class Fa3DefaultScales(_BatchMLAPagedAttentionFa3Backend):
    """Upstream's FA3, taken by `auto` on SM90 where it is faster: its scales default to 1.0 too."""

    def _run_generated_fa(self, *, ckv_scale, ckv_scale_arr, kpe_scale, **inputs):
        return super()._run_generated_fa(
            ckv_scale=1.0 if ckv_scale is None and ckv_scale_arr is None else ckv_scale,
            ckv_scale_arr=ckv_scale_arr,
            kpe_scale=1.0 if kpe_scale is None else kpe_scale,
            **inputs,
        )


def _auto_takes_fa3(args) -> bool:
    """Whether `auto` on an SM90 device takes FA3; a CUDA graph keeps the backend it began with."""
    if args._use_cuda_graph and args._previous_backend_name is not None:
        preferred = args._previous_backend_name == "fa3"
    else:
        csr = args.csr()
        query_tokens = int(csr.qo_indptr[-1])
        rows = args.num_heads * query_tokens / max(csr.kv_len_arr.numel(), 1)
        preferred = capability.sm90_auto_choice(rows) == "fa3"
    if preferred:
        try:
            _BatchMLAPagedAttentionFa3Backend.preflight_plan_from_wrapper(args)
        except _BackendPlanUnsupportedError:
            return False
    return preferred


def select_backend(requested: type, args, contract: MLAInputContract):
    """Backend class and run contract for an FP8 KV plan.

    `requested` is the wrapper's backend class, `args` its plan arguments. Upstream keeps every
    explicit backend but "fa2", FP8 queries where `auto` has backends for them, and plans that ask
    for something only upstream does (profiler, sinks, BMM scales, skip-softmax, FP8 output).
    """
    auto = requested is _BatchMLAPagedAttentionAutoBackend
    if not auto and requested is not _BatchMLAPagedAttentionFa2Backend:
        return requested, contract
    major = capability.compute_capability(args._float_workspace_buffer.device)[0]
    if args.use_profiler and major == 9:
        return requested, contract
    if auto:
        if args.q_data_type not in capability.QUERY_DTYPES and major >= 10:
            return requested, contract
        if plan_capability_rejection_reason(args, Fp8KvBackend._plan_capabilities):
            return requested, contract
        if major == 9 and _auto_takes_fa3(args):
            return Fa3DefaultScales, Fp8InputContract.of(contract)
    return Fp8KvBackend, Fp8InputContract.of(contract)
