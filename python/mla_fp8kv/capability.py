"""Which calls the FP8 KV kernels take, and which stay with upstream: pure rules."""

import torch

QUERY_DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIM_CKV = 512
HEAD_DIMS_KPE = (64, 0)
MIN_COMPUTE_CAPABILITY = (8, 0)

# What `backend="auto"` takes on SM90: the last row whose first column is not above the packed rows
# (num_heads x query tokens) of a mean request decides. One row, because upstream's FP8 FA3 took 2.9
# to 8.5 times our time in every row of bench/results/nvidia-h200.json, 8 to 2048 packed rows.
SM90_AUTO = ((0, "mla_fp8kv"),)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor) of a CUDA device; ValueError for any other device."""
    if device.type != "cuda":
        raise ValueError(
            "MLA with an FP8 KV cache runs on CUDA devices of compute capability 8.0 or newer; "
            f"float_workspace_buffer is on {device}."
        )
    return torch.cuda.get_device_capability(device)


def unsupported_reason(
    *,
    capability: tuple[int, int],
    q_data_type: torch.dtype,
    output_dtype: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
) -> str | None:
    """One sentence saying why a plan with FP8 KV cannot be served, or None when it can."""
    if capability < MIN_COMPUTE_CAPABILITY:
        return (
            "MLA with an FP8 KV cache needs compute capability 8.0 or newer, "
            f"this device has {capability[0]}.{capability[1]}."
        )
    if q_data_type not in QUERY_DTYPES:
        return (
            f"q_data_type must be {QUERY_DTYPES[0]} or {QUERY_DTYPES[1]} with an FP8 KV cache, "
            f"got {q_data_type}."
        )
    if output_dtype != q_data_type:
        return (
            f"output_dtype must equal q_data_type={q_data_type} with an FP8 KV cache, "
            f"got {output_dtype}."
        )
    if head_dim_ckv != HEAD_DIM_CKV or head_dim_kpe not in HEAD_DIMS_KPE:
        return (
            "head_dim_ckv=512 with head_dim_kpe=64 or 0 is supported with an FP8 KV cache, "
            f"got head_dim_ckv={head_dim_ckv}, head_dim_kpe={head_dim_kpe}."
        )
    return None


def sm90_auto_choice(rows_per_request: float) -> str:
    """Backend that `auto` takes on SM90, "mla_fp8kv" or "fa3", from the table above."""
    return [name for rows, name in SM90_AUTO if rows <= rows_per_request][-1]
