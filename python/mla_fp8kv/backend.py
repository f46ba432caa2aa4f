"""FlashInfer 0.7's hook: the planned-wrapper backend for FP8 KV, and who takes which plan.

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

from . import capability, checks
from .planned import Fp8Plan

_TWO_TENSORS = [torch.Tensor, torch.Tensor]
_NOTHING_UNUSUAL = (None,) * 8


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
        checks.softmax_scale(args.sm_scale)
        checks.indptr_lengths(csr.qo_indptr, csr.kv_indptr, csr.kv_len_arr)
        if args._use_cuda_graph:
            buffers = (
                ("qo_indptr", args._qo_indptr_buf, csr.qo_indptr, False),
                ("kv_indptr", args._kv_indptr_buf, csr.kv_indptr, False),
                ("kv_indices", args._kv_indices_buf, csr.kv_indices, True),
                ("kv_len_arr", args._kv_len_arr_buf, csr.kv_len_arr, False),
            )
            cls._validate_graph_metadata_buffers(workspace.device, buffers)
            checks.graph_buffers({name: buffer for name, buffer, *_ in buffers})

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
        plan = Fp8Plan(
            float_workspace=self._float_workspace_buffer,
            int_workspace=self._int_workspace_buffer,
            pinned_workspace=self._pin_memory_int_workspace_buffer,
            int_workspace_is_new=self._int_workspace_is_new,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            causal=causal,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        self._stage_metadata(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
        )
        self._fp8_plan = plan
        self._cached_module = plan.module
        self._plan_info = plan.plan_info
        self._causal = causal
        self._page_size = page_size
        self._sm_scale = sm_scale

    def run_or_check(
        self,
        contract,
        query,
        kv_cache,
        out,
        lse,
        return_lse,
        return_lse_base_on_e,
        ckv_scale,
        ckv_scale_arr,
        kpe_scale,
        *unusual,
    ):
        """The result of run(), or None when its own way of many checks has to be gone.

        Called first, with all that was given to run(); of `unusual` an FP8 plan takes nothing.
        ValueError for queries and caches that the plan does not fit.
        """
        lse_mode = "none"
        if return_lse or lse is not None or return_lse_base_on_e:
            lse_mode = "basee" if return_lse_base_on_e else "base2"
        if (
            lse_mode == contract.lse_mode
            and unusual == _NOTHING_UNUSUAL
            and type(query) is type(kv_cache) is tuple
            and len(query) == len(kv_cache) == 2
            and contract.query_layout == contract.kv_cache_layout == "split"
        ):
            result = self._fp8_plan.run_at_once(
                *query,
                *kv_cache,
                out=out,
                lse=lse,
                return_lse=return_lse,
                return_lse_base_on_e=return_lse_base_on_e,
                ckv_scale=ckv_scale,
                ckv_scale_arr=ckv_scale_arr,
                kpe_scale=kpe_scale,
                **self._planned_arguments(),
            )
            if result is not None:
                return result
        plan = self._fp8_plan
        self._check_input(query, plan.check_query, plan.check_packed_query)
        self._check_input(kv_cache, plan.check_cache, plan.check_packed_cache)
        return None

    def _planned_arguments(self) -> dict:
        return {
            "kv_indices": self._kv_indices_buf,
            "causal": self._causal,
            "page_size": self._page_size,
            "sm_scale": self._sm_scale,
            "in_cuda_graph": self._use_cuda_graph,
        }

    @staticmethod
    def _check_input(value, check_pair, check_packed) -> None:
        if type(value) is tuple and list(map(type, value)) == _TWO_TENSORS:
            check_pair(*value)
            return
        # Packed, both forms at once, or malformed.
        packed, pair = _parse_structural_mla_input(value, name=check_packed.name)
        if pair is None:
            check_packed(packed)
        else:
            check_pair(*pair)

    def _check_planned_geometry(self, q_nope, ckv_cache) -> None:
        """Since 0.7.4 upstream compares with what its own plan() kept; run_or_check has it."""

    def _run_generated_fa(self, *, profiler_buffer, **arguments):
        return self._fp8_plan.run(**self._planned_arguments(), **arguments)


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
