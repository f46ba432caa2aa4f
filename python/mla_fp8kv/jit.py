"""The JIT module of the FP8 KV kernels: its name (the cache key), sources and flags.

One module per (KV dtype, head_dim_kpe); query and output dtype are chosen at run time. FlashInfer's
loader finds an ahead-of-time copy by the same name, as for its own modules.
"""

import functools
import os
from pathlib import Path

import torch
from filelock import FileLock
from flashinfer.jit.core import JitSpec, current_compilation_context, gen_jit_spec

from . import storage
from .module import StagedModule

KERNEL_DIR = Path(__file__).resolve().parent / "kernel"
SOURCES = (
    KERNEL_DIR / "binding" / "mla_fp8kv_plan.cu",
    KERNEL_DIR / "binding" / "mla_fp8kv_run.cu",
)
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def dequant_bits() -> bool:
    """True when MLA_FP8KV_DEQUANT=bits asks for the conversion that SM80 and SM86 use."""
    value = os.environ.get("MLA_FP8KV_DEQUANT", "")
    if value not in ("", "bits"):
        raise ValueError(f"MLA_FP8KV_DEQUANT must be unset or 'bits', got {value!r}.")
    return value == "bits"


def loads_only() -> bool:
    """True when MLA_FP8KV_LOADS_ONLY=1 asks for the kernel without its products.

    For the benchmark, which shows what the loads alone cost; results are wrong on purpose.
    """
    value = os.environ.get("MLA_FP8KV_LOADS_ONLY", "")
    if value not in ("", "1"):
        raise ValueError(f"MLA_FP8KV_LOADS_ONLY must be unset or '1', got {value!r}.")
    return value == "1"


def module_uri(
    kv_dtype: torch.dtype, head_dim_kpe: int, bits: bool = False, loads: bool = False
) -> str:
    """Name of the module, which is its key in FlashInfer's JIT and ahead-of-time caches."""
    uri = f"mla_fp8kv_1_kv_{_FORMATS[kv_dtype]}_kpe_{head_dim_kpe}"
    return uri + "_bits" * bits + "_loads" * loads


def gen_module(
    kv_dtype: torch.dtype, head_dim_kpe: int, bits: bool = False, loads: bool = False
) -> JitSpec:
    """Build specification of one module; sources are compiled where the package has them."""
    spec = gen_jit_spec(
        module_uri(kv_dtype, head_dim_kpe, bits, loads),
        SOURCES,
        extra_cuda_cflags=[
            "-Xptxas=-warn-spills",
            f"-DMLA_FP8KV_E5M2={int(kv_dtype == torch.float8_e5m2)}",
            f"-DMLA_FP8KV_KPE={head_dim_kpe}",
            f"-DMLA_FP8KV_DEQUANT_BITS={int(bits)}",
        ]
        + ["-DMLA_FP8KV_LOADS_ONLY=1"] * loads,
        extra_include_paths=[KERNEL_DIR],
    )
    # A default that 0.6 cannot be told to leave out.
    spec.extra_cuda_cflags.remove("-use_fast_math")
    return spec


def check_architectures() -> None:
    """Refuse to compile for SM90 without its own instructions, as 0.6 can be told to."""
    if (9, "0") in current_compilation_context.TARGET_CUDA_ARCHS:
        raise RuntimeError(
            "The FP8 MLA module cannot be compiled for architecture 9.0; FLASHINFER_CUDA_ARCH_LIST "
            "must name it 9.0a, as FlashInfer's own kernels for SM90 need, too."
        )


@functools.cache
def _load(kv_dtype: torch.dtype, head_dim_kpe: int, bits: bool, loads: bool):
    spec = gen_module(kv_dtype, head_dim_kpe, bits, loads)
    try:
        if not spec.is_aot:
            check_architectures()
            # 0.6 keeps the build file of an earlier installation, whose paths and flags may differ.
            with FileLock(spec.lock_path, thread_local=False):
                spec.write_ninja()
        return StagedModule(spec.build_and_load())
    except (OSError, RuntimeError) as error:  # a compiler that fails is a RuntimeError
        for variable, directory in (
            ("FLASHINFER_WORKSPACE_BASE", spec.build_dir),
            ("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp")),
        ):
            if reason := storage.fault(directory):
                raise RuntimeError(
                    f"The FP8 MLA module {spec.name} cannot be compiled: {storage.MEGABYTES} MB "
                    f"cannot be written to {directory} ({reason}); set {variable} to a directory "
                    "that has room and can be written."
                ) from error
        raise


def get_module(kv_dtype: torch.dtype, head_dim_kpe: int):
    """The loaded module with `plan` and `run`; compiled or taken from a cache on first use."""
    return _load(kv_dtype, head_dim_kpe, dequant_bits(), loads_only())
