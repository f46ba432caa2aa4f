"""Refusals of tensors and scales: one sentence each, before anything launches or is written."""

import math

import torch

_ALIGN = 16  # bytes a cp.async or a vector load moves at once


def dtype_mismatch(name: str, given: torch.dtype, planned_name: str, planned: torch.dtype) -> str:
    """Sentence for an input whose dtype is not the planned one."""
    text = f"{name} must have the planned {planned_name}={planned}, got {given}"
    if given in (torch.uint8, torch.int8) and planned.itemsize == 1:
        return f"{text}: a pool stored as bytes is passed as {name}.view({planned})."
    return text + "."


class TensorCheck:
    """Checks dtype, device, shape, strides and alignment of one argument, call after call.

    `shape` may hold None where any extent goes. Rows must be contiguous, and every row must start
    on a 16-byte boundary. A tensor of width 0 (head_dim_kpe=0) is never read. A model calls with
    the same kind of tensor in every layer: a description that was accepted once is not looked at
    again, only the address is.
    """

    def __init__(self, name, shape, dtype, device, planned_name) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.planned_name = planned_name
        self._accepted = None

    def __call__(self, value: torch.Tensor) -> None:
        description = (value.shape, value.stride(), value.dtype, value.device)
        if description != self._accepted:
            self._check(*description)
            self._accepted = description
        if value.data_ptr() % _ALIGN:
            raise ValueError(_misaligned(self.name, value))

    def _check(self, shape, strides, dtype, device) -> None:
        name = self.name
        if dtype != self.dtype:
            raise ValueError(dtype_mismatch(name, dtype, self.planned_name, self.dtype))
        if device != self.device:
            raise ValueError(f"{name} must be on the wrapper's device {self.device}, got {device}.")
        if len(shape) != len(self.shape) or any(
            want is not None and want != have for want, have in zip(self.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
            raise ValueError(f"{name} must have shape ({wanted}) as planned, got {tuple(shape)}.")
        if 0 in shape:
            return
        if strides[-1] != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {strides}."
            )
        step = _ALIGN // dtype.itemsize
        for extent, stride in zip(shape[:-1], strides[:-1], strict=True):
            if extent > 1 and stride % step:
                raise ValueError(
                    f"{name} must have row strides that are multiples of {_ALIGN} bytes "
                    f"({step} elements of {dtype}), got strides {strides}."
                )


class PairCheck:
    """Checks the two parts of a query or a cache, (q_nope, q_pe) or (ckv_cache, kpe_cache)."""

    def __init__(self, check_left: TensorCheck, check_right: TensorCheck) -> None:
        self.check_left = check_left
        self.check_right = check_right

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.check_left(left)
        self.check_right(right)
        if left.shape[0] != right.shape[0]:
            raise ValueError(
                f"{self.check_left.name} and {self.check_right.name} must have the same first "
                f"extent, got {left.shape[0]} and {right.shape[0]}."
            )


def _misaligned(name: str, value: torch.Tensor) -> str:
    return (
        f"{name} must start on a {_ALIGN}-byte boundary, "
        f"got an address {value.data_ptr() % _ALIGN} bytes past one."
    )


def workspace(value) -> None:
    """Check float_workspace_buffer, of any dtype; the plan checks its size."""
    if not value.is_contiguous():
        raise ValueError(
            f"float_workspace_buffer must be contiguous, got strides {value.stride()}."
        )
    if value.data_ptr() % _ALIGN:
        raise ValueError(_misaligned("float_workspace_buffer", value))


def positive(name: str, value) -> None:
    """Check a count."""
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive int, got {value}.")


def softmax_scale(value) -> None:
    """Check sm_scale, which CUDA graphs and runs take from the plan."""
    if not 0.0 <= value < math.inf:
        raise ValueError(f"sm_scale must be a finite number that is not negative, got {value}.")


def metadata(name: str, value, device) -> None:
    """Check the form of a tensor of plan(), which is on the wrapper's device or on the CPU."""
    if value.dtype != torch.int32 or value.dim() != 1 or not value.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous torch.int32 vector, got {value.dtype} of shape "
            f"{tuple(value.shape)} and strides {value.stride()}."
        )
    if value.device.type != "cpu" and value.device != device:
        raise ValueError(
            f"{name} must be on the CPU or the wrapper's device {device}, got {value.device}."
        )


def indptr_lengths(qo_indptr, kv_indptr, kv_len_arr) -> None:
    """Metadata may be longer than the batch, as upstream allows, but never shorter."""
    batch = kv_len_arr.numel()
    for name, indptr in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if indptr.numel() < batch + 1:
            raise ValueError(
                f"{name} must have batch + 1 = {batch + 1} entries, got {indptr.numel()}."
            )


def graph_buffers(buffers: dict) -> None:
    """Check that the buffers that use_cuda_graph=True needs, by name, were given at all."""
    missing = [name for name, buffer in buffers.items() if buffer is None]
    if missing:
        raise ValueError(
            "use_cuda_graph=True needs the reserved buffers qo_indptr, kv_indptr, kv_indices and "
            f"kv_len_arr, got none for {', '.join(missing)}."
        )


def lse(value, shape, device) -> None:
    """Check a caller's lse buffer: float32, contiguous, [query tokens, num_heads]."""
    if value.dtype != torch.float32:
        raise ValueError(f"lse must be torch.float32, got {value.dtype}.")
    if value.device != device:
        raise ValueError(f"lse must be on the wrapper's device {device}, got {value.device}.")
    if tuple(value.shape) != shape:
        raise ValueError(f"lse must have shape {shape}, got {tuple(value.shape)}.")
    if not value.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {value.stride()}.")


def scale(name: str, value) -> float:
    """A scale as float; None means 1.0."""
    if value is None:
        return 1.0
    number = float(value)
    if not math.isfinite(number) or number <= 0.0:
        raise ValueError(f"{name} must be a finite positive number, got {value}.")
    return number


def scale_array(value, ckv_cache) -> None:
    """Check ckv_scale_arr: float32, contiguous, one scale a token and 128 channels."""
    shape = (*ckv_cache.shape[:-1], ckv_cache.shape[-1] // 128)
    if value.dtype != torch.float32:
        raise ValueError(f"ckv_scale_arr must be torch.float32, got {value.dtype}.")
    if value.device != ckv_cache.device:
        raise ValueError(
            f"ckv_scale_arr must be on ckv_cache's device {ckv_cache.device}, got {value.device}."
        )
    if tuple(value.shape) != shape:
        raise ValueError(
            "ckv_scale_arr must have shape (pages, page_size, head_dim_ckv / 128) = "
            f"{shape}, got {tuple(value.shape)}."
        )
    if not value.is_contiguous():
        raise ValueError(f"ckv_scale_arr must be contiguous, got strides {value.stride()}.")
    if value.data_ptr() % _ALIGN:
        raise ValueError(_misaligned("ckv_scale_arr", value))
