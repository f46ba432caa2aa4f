"""Refusals of run() arguments: one sentence each, before anything launches or is written."""

import math

import torch

_ALIGN = 16  # bytes a cp.async or a vector load moves at once


def dtype_mismatch(name: str, given: torch.dtype, planned_name: str, planned: torch.dtype) -> str:
    """Sentence for an input whose dtype is not the planned one."""
    text = f"{name} must have the planned {planned_name}={planned}, got {given}"
    if given in (torch.uint8, torch.int8) and planned.itemsize == 1:
        return f"{text}: a pool stored as bytes is passed as {name}.view({planned})."
    return text + "."


def tensor(name, value, shape, dtype, device, *, planned_name) -> None:
    """Check dtype, device, shape, strides and alignment of one input or of `out`.

    `shape` may hold None where any extent goes. Rows must be contiguous, and every row must start
    on a 16-byte boundary. A tensor of width 0 (head_dim_kpe=0) is never read.
    """
    if value.dtype != dtype:
        raise ValueError(dtype_mismatch(name, value.dtype, planned_name, dtype))
    if value.device != device:
        raise ValueError(f"{name} must be on the wrapper's device {device}, got {value.device}.")
    given = value.shape
    if len(given) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, given)
    ):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} must have shape ({wanted}) as planned, got {tuple(given)}.")
    if 0 in given:
        return
    size = value.itemsize
    stride = value.stride()
    if stride[-1] != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {stride}.")
    for extent, step in zip(given[:-1], stride):
        if extent > 1 and step * size % _ALIGN:
            raise ValueError(
                f"{name} must have row strides that are multiples of {_ALIGN} bytes "
                f"({_ALIGN // size} elements of {dtype}), got strides {stride}."
            )
    if value.data_ptr() % _ALIGN:
        raise ValueError(
            f"{name} must start on a {_ALIGN}-byte boundary, "
            f"got an address {value.data_ptr() % _ALIGN} bytes past one."
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
