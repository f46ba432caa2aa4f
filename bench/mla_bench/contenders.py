"""Everything that is timed: our kernel in its variants and the baselines, each as "run layer i".

A contender that cannot run here (not installed, not compiled, not this GPU, not this shape) raises
`Unavailable` with the reason, which the results keep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .case import SM_SCALE, Case, PageTable, caches
from .rows import BUILD_VARIABLES, HEAD_DIM_CKV, HEAD_DIM_KPE, LAYERS, Variant
from .wrapper import is_flat, plan, tensors


class Unavailable(Exception):
    """This contender cannot run this case here; the text says why."""


@dataclass
class Prepared:
    """A planned contender.

    Attributes:
        run_layer: launches layer i (0..7) on the current stream and returns its output tensor.
        page_size: page size of the table whose tokens it attends to.
        wrapper: the FlashInfer wrapper behind it, if there is one.
    """

    run_layer: Callable[[int], torch.Tensor]
    page_size: int
    wrapper: object = None


@contextmanager
def environment(variables: dict[str, str]):
    """Sets environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _through_wrapper(
    case: Case,
    backend: str,
    kv_dtype: torch.dtype,
    pools: list[torch.Tensor],
    table: PageTable,
    before: Callable[[int], None] | None = None,
    **scales: float,
) -> Prepared:
    """Layers that run the wrapper over `pools`, each after `before(layer)` if that is given."""
    wrapper = plan(case, backend, kv_dtype, table)
    query = case.q[..., :HEAD_DIM_CKV], case.q[..., HEAD_DIM_CKV:]
    layers = [tensors(query, caches(pool, table.page_size)) for pool in pools]

    group_scales = case.group_scales if case.row.group_scales else [None] * len(layers)

    def run_layer(layer: int) -> torch.Tensor:
        if before is not None:
            before(layer)
        return wrapper.run(
            **layers[layer], out=case.out, ckv_scale_arr=group_scales[layer], **scales
        )

    return Prepared(run_layer, case.row.page_size, wrapper)


def ours(case: Case, variant: Variant, loads_only: bool = False) -> Prepared:
    """Our kernel in one variant, through the public wrapper; wrong results if `loads_only`."""
    try:
        from mla_fp8kv import jit
    except ImportError as error:
        raise Unavailable("flashinfer here is not the patched build (no mla_fp8kv)") from error
    env = variant.loads_only_env() if loads_only else variant.env
    with environment(env):
        prepared = _through_wrapper(
            case, variant.backend, case.pools.dtype, case.pools.fp8, case.table
        )
        built = jit.get_module(case.pools.dtype, HEAD_DIM_KPE)
    # A variable this build does not know would pass the default module's time off as another's.
    needs = " and ".join(name for name in BUILD_VARIABLES if name in env)
    if needs and built is jit.get_module(case.pools.dtype, HEAD_DIM_KPE):
        raise Unavailable(f"{needs} selected the default module")
    if needs and prepared.wrapper._cached_module is not built:
        raise Unavailable(f"{variant.backend} took another backend, which has no {needs}")
    return prepared


def _without_group_scales(case: Case) -> None:
    if case.row.group_scales:
        raise Unavailable("takes no group scales")


def _cast(backend: str):
    def prepare(case: Case) -> Prepared:
        """SGLang today: the whole pool to BF16, in every layer."""
        _without_group_scales(case)
        staging, fp8 = case.pools.staging, case.pools.fp8

        def cast(layer: int) -> None:
            staging.copy_(fp8[layer])

        return _through_wrapper(
            case, backend, torch.bfloat16, [staging] * LAYERS, case.table, before=cast
        )

    return prepare


def _gather_cast_fa2(case: Case) -> Prepared:
    """Only the tokens in use: gathered, widened, read in order."""
    _without_group_scales(case)
    slots = case.table.slots(case.row.kv_lens)
    gathered = torch.empty(
        len(slots), case.q.shape[-1], dtype=torch.uint8, device=case.pools.device
    )
    widened = torch.empty_like(gathered, dtype=torch.bfloat16)
    fp8 = [pool.view(torch.uint8) for pool in case.pools.fp8]

    def gather(layer: int) -> None:
        torch.index_select(fp8[layer], 0, slots, out=gathered)
        widened.copy_(gathered.view(case.pools.dtype))

    return _through_wrapper(
        case, "fa2", torch.bfloat16, [widened] * LAYERS, case.linear_table(), before=gather
    )


def _bf16(backend: str):
    def prepare(case: Case) -> Prepared:
        """A pool that is kept in BF16: twice the bytes, no conversion."""
        _without_group_scales(case)
        return _through_wrapper(case, backend, torch.bfloat16, case.pools.bf16, case.table)

    return prepare


def _fa3_fp8(case: Case) -> Prepared:
    """Upstream's FP8 path: repacks each tile to BF16 in shared memory."""
    if is_flat():
        raise Unavailable("upstream has no FP8 KV for MLA in this release")
    scales = {"kpe_scale": 1.0}
    if not case.row.group_scales:
        scales["ckv_scale"] = 1.0
    return _through_wrapper(case, "fa3", case.pools.dtype, case.pools.fp8, case.table, **scales)


_FLASHMLA_PAGE = 64


def _flashmla(fp8: bool):
    def prepare(case: Case) -> Prepared:
        """FlashMLA's dense decode on pages of 64; its FP8 form takes the query in FP8, too."""
        _without_group_scales(case)
        try:
            from flash_mla import (
                flash_mla_with_kvcache,
                get_mla_decoding_metadata,
                get_mla_metadata,
            )
        except ImportError as error:
            raise Unavailable("sgl-flash-mla is not installed") from error
        row = case.row
        if fp8 and case.pools.dtype != torch.float8_e4m3fn:
            raise Unavailable("reads e4m3 only")
        if row.qo_len > 8:
            raise Unavailable("is a decode kernel")
        table = case.table_of(_FLASHMLA_PAGE)
        blocks = table.dense()
        query = case.q.view(row.batch, row.qo_len, row.heads, -1)
        options = {}
        metadata, _ = get_mla_metadata()
        if fp8:
            query = query.to(torch.float8_e4m3fn)  # outside the timing: to its advantage
            one = torch.ones(1, device=case.pools.device)
            options = {"descale_q": one, "descale_k": one}
            metadata.tile_scheduler_metadata, metadata.num_splits = get_mla_decoding_metadata(
                case.kv_lens, row.qo_len * row.heads, 1, is_fp8_kvcache=True, use_legacy=True
            )
        pools = case.pools.fp8 if fp8 else case.pools.bf16
        layers = [pool.view(-1, _FLASHMLA_PAGE, 1, case.q.shape[-1]) for pool in pools]

        def attend(layer: int) -> torch.Tensor:
            out, _ = flash_mla_with_kvcache(
                query,
                layers[layer],
                blocks,
                case.kv_lens,
                HEAD_DIM_CKV,
                metadata,
                softmax_scale=SM_SCALE,
                causal=row.causal,
                is_fp8_kvcache=fp8,
                use_legacy=True,
                **options,
            )
            return out

        return Prepared(attend, _FLASHMLA_PAGE)

    return prepare


def _sglang_triton_fp8(case: Case) -> Prepared:
    """SGLang's Triton decode kernel over the FP8 pool: what SM120 users fall back to."""
    _without_group_scales(case)
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    except ImportError as error:
        raise Unavailable(f"SGLang is not installed ({error})") from error
    row, device = case.row, case.pools.device
    if row.qo_len != 1:
        raise Unavailable("is a decode kernel")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    # SGLang's cap for MLA: the SM count rounded up to a power of two.
    most_splits = 1 << (sms - 1).bit_length()
    partial = torch.empty(row.batch, row.heads, most_splits, HEAD_DIM_CKV, device=device)
    partial_lse = torch.empty(row.batch, row.heads, most_splits, device=device)
    splits = torch.empty(row.batch, dtype=torch.int32, device=device)
    get_num_kv_splits_triton[(1,)](
        splits,
        case.kv_lens,
        row.batch,
        1,
        row.heads,
        1,
        most_splits,
        sms,
        MAX_NUM_SEQ=max(256, 1 << (row.batch - 1).bit_length()),
    )
    indptr = torch.nn.functional.pad(case.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
    slots = case.table.slots(row.kv_lens)
    layers = [pool.view(-1, 1, case.q.shape[-1]) for pool in case.pools.fp8]
    pdl = torch.cuda.get_device_capability(device)[0] >= 9

    def run_layer(layer: int) -> torch.Tensor:
        decode_attention_fwd(
            case.q,
            layers[layer],
            layers[layer][..., :HEAD_DIM_CKV],
            case.out,
            indptr,
            slots,
            partial,
            partial_lse,
            splits,
            most_splits,
            SM_SCALE,
            1.0,
            1.0,
            has_mla=True,
            use_pdl=pdl,
        )
        return case.out

    return Prepared(run_layer, row.page_size)


@dataclass(frozen=True)
class Baseline:
    """A way to do the same without our kernel; `prepare` plans it for a case."""

    name: str
    prepare: Callable[[Case], Prepared]


BASELINES = (
    Baseline("cast+fa2", _cast("fa2")),
    Baseline("cast+fa3", _cast("fa3")),
    Baseline("gather+cast+fa2", _gather_cast_fa2),
    Baseline("fa2-bf16", _bf16("fa2")),
    Baseline("fa3-bf16", _bf16("fa3")),
    Baseline("fa3-fp8", _fa3_fp8),
    Baseline("flashmla-bf16", _flashmla(fp8=False)),
    Baseline("flashmla-fp8", _flashmla(fp8=True)),
    Baseline("sglang-triton-fp8", _sglang_triton_fp8),
)
