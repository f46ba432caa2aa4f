"""Wrong calls and the exact sentence each one gets.

The same table is checked without a GPU (tests/hooks) and on one (test_errors.py). `{device}` in a
sentence is the wrapper's device. A good call has 2 query tokens, 8 heads and 64 pages of 4 tokens.
"""

from dataclasses import dataclass, field

import torch
from flashinfer_base import FLAT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass
class Call:
    """Arguments of one plan and one run."""

    device: str
    plan: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    workspace: torch.Tensor | None = None

    def __post_init__(self):
        def int32(*values):
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        self.workspace = torch.empty(128 << 20, dtype=torch.uint8, device=self.device)
        self.plan = {
            "qo_indptr": int32(0, 1, 2),
            "kv_indptr": int32(0, 2, 4),
            "kv_indices": int32(3, 1, 4, 2),
            "kv_len_arr": int32(5, 7),
            "num_heads": 8,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": 4,
            "causal": False,
            "sm_scale": 0.1,
            "q_data_type": BF16,
            "kv_data_type": E4M3,
        }
        query = torch.linspace(-1, 1, 2 * 8 * 576, device=self.device).to(BF16).view(2, 8, 576)
        codes = torch.arange(64 * 4 * 576, device=self.device) % 120  # finite in both formats
        pool = codes.to(torch.uint8).view(64, 4, 576).view(E4M3)
        self.tensors = {
            "q_nope": query[..., :512],
            "q_pe": query[..., 512:],
            "ckv_cache": pool[..., :512],
            "kpe_cache": pool[..., 512:],
            "out": torch.full((2, 8, 512), 7, dtype=BF16, device=self.device),
        }

    def do_plan(self, wrapper) -> None:
        wrapper.plan(**self.plan)

    def do_run(self, wrapper):
        return wrapper.run(**self.tensors, **self.options)


def _plan(**changes):
    return lambda call: call.plan.update(changes)


def _tensor(name, change):
    def apply(call):
        call.tensors[name] = change(call.tensors[name])

    return apply


def _option(**changes):
    return lambda call: call.options.update(changes)


def _scale_array(*shape, dtype=FP32):
    def apply(call):
        call.options["ckv_scale_arr"] = torch.ones(*shape, dtype=dtype, device=call.device)

    return apply


def _lse(make):
    def apply(call):
        call.options.update(return_lse=True, lse=make(call.device))

    return apply


def _misaligned(tensor):
    """The same shape and strides, one element further in memory."""
    storage = torch.zeros(tensor.numel() * 2 + 64, dtype=torch.uint8, device=tensor.device)
    view = storage[tensor.itemsize :][: tensor.numel() * tensor.itemsize]
    if tensor.itemsize > 1:
        buffer = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
        return buffer[1 : 1 + tensor.numel()].view(tensor.shape)
    return view.view(tensor.dtype).view(tensor.shape)


def _rows_of(width):
    """The same shape in rows of `width` elements."""

    def change(tensor):
        wide = torch.zeros(
            *tensor.shape[:-1], width * tensor.itemsize, dtype=torch.uint8, device=tensor.device
        )
        return wide.view(tensor.dtype)[..., : tensor.shape[-1]]

    return change


def _spread(tensor):
    """The same shape with a gap after each element."""
    wide = torch.zeros(*tensor.shape, 2, dtype=torch.uint8, device=tensor.device)
    return wide.repeat_interleave(tensor.itemsize, -1).view(tensor.dtype)[..., 0]


def _cut(width):
    return lambda tensor: tensor[..., :width]


PLAN = {
    "query FP8": (
        _plan(q_data_type=E4M3),
        "q_data_type must be torch.bfloat16 or torch.float16 with an FP8 KV cache, "
        "got torch.float8_e4m3fn.",
    ),
    "query FP32": (
        _plan(q_data_type=FP32),
        "q_data_type must be torch.bfloat16 or torch.float16 with an FP8 KV cache, "
        "got torch.float32.",
    ),
    "output of another type": (
        _plan(output_dtype=FP16),
        "output_dtype must equal q_data_type=torch.bfloat16 with an FP8 KV cache, "
        "got torch.float16.",
    ),
    "head_dim_ckv 256": (
        _plan(head_dim_ckv=256),
        "head_dim_ckv=512 with head_dim_kpe=64 or 0 is supported with an FP8 KV cache, "
        "got head_dim_ckv=256, head_dim_kpe=64.",
    ),
    "head_dim_kpe 128": (
        _plan(head_dim_kpe=128),
        "head_dim_ckv=512 with head_dim_kpe=64 or 0 is supported with an FP8 KV cache, "
        "got head_dim_ckv=512, head_dim_kpe=128.",
    ),
    "sm_scale NaN": (_plan(sm_scale=float("nan")), "sm_scale must be finite."),
    "sm_scale infinite": (_plan(sm_scale=float("inf")), "sm_scale must be finite."),
    "sm_scale negative": (
        _plan(sm_scale=-0.1),
        "sm_scale must be a finite number that is not negative, got -0.1.",
    ),
    "page_size 0": (_plan(page_size=0), "page_size must be a positive int, got 0."),
    "no heads": (_plan(num_heads=0), "num_heads and page_size must be positive."),
    "pages do not fit the lengths": (
        lambda call: call.plan["kv_len_arr"].add_(4),
        "CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size).",
    ),
    "fewer indices than pages": (
        lambda call: call.plan.update(kv_indices=call.plan["kv_indices"][:3]),
        "kv_indices metadata has 3 entries but kv_indptr[-1] is 4.",
    ),
    "qo_indptr too short": (
        lambda call: call.plan.update(qo_indptr=call.plan["qo_indptr"][:2]),
        "qo_indptr must have batch + 1 = 3 entries, got 2.",
    ),
    "BMM scales": (
        _plan(scale_mode="bmm-scalar"),
        "fa2 backend does not support this scale contract.",
    ),
}

RUN = {
    "ckv as bytes": (
        _tensor("ckv_cache", lambda t: t.view(torch.uint8)),
        "ckv_cache must have the planned kv_data_type=torch.float8_e4m3fn, got torch.uint8: a pool "
        "stored as bytes is passed as ckv_cache.view(torch.float8_e4m3fn).",
    ),
    "kpe as bytes": (
        _tensor("kpe_cache", lambda t: t.view(torch.uint8)),
        "kpe_cache must have the planned kv_data_type=torch.float8_e4m3fn, got torch.uint8: a pool "
        "stored as bytes is passed as kpe_cache.view(torch.float8_e4m3fn).",
    ),
    "ckv BF16": (
        _tensor("ckv_cache", lambda t: t.to(BF16)),
        "ckv_cache must have the planned kv_data_type=torch.float8_e4m3fn, got torch.bfloat16.",
    ),
    "ckv of the other format": (
        _tensor("ckv_cache", lambda t: t.view(E5M2)),
        "ckv_cache must have the planned kv_data_type=torch.float8_e4m3fn, got torch.float8_e5m2.",
    ),
    "query FP8": (
        _tensor("q_nope", lambda t: t.to(E4M3)),
        "q_nope must have the planned q_data_type=torch.bfloat16, got torch.float8_e4m3fn.",
    ),
    "q_pe FP16": (
        _tensor("q_pe", lambda t: t.half()),
        "q_pe must have the planned q_data_type=torch.bfloat16, got torch.float16.",
    ),
    "other heads": (
        _tensor("q_nope", lambda t: t[:, :4]),
        "q_nope must have shape (any, 8, 512) as planned, got (2, 4, 512).",
    ),
    "narrow query": (
        _tensor("q_nope", _cut(256)),
        "q_nope must have shape (any, 8, 512) as planned, got (2, 8, 256).",
    ),
    "narrow q_pe": (
        _tensor("q_pe", _cut(32)),
        "q_pe must have shape (any, 8, 64) as planned, got (2, 8, 32).",
    ),
    "flat query": (
        _tensor("q_nope", lambda t: t.flatten(0, 1)),
        "q_nope must have shape (any, 8, 512) as planned, got (16, 512).",
    ),
    "fewer query tokens": (
        lambda call: call.tensors.update(
            {name: call.tensors[name][:1] for name in ("q_nope", "q_pe", "out")}
        ),
        "q_nope must have at least the 2 planned query tokens, got 1.",
    ),
    "q_nope and q_pe of other lengths": (
        _tensor("q_pe", lambda t: t[:1]),
        "q_nope and q_pe must have the same first extent, got 2 and 1.",
    ),
    "other page size": (
        _tensor("ckv_cache", lambda t: t[:, :2]),
        "ckv_cache must have shape (any, 4, 512) as planned, got (64, 2, 512).",
    ),
    "narrow ckv": (
        _tensor("ckv_cache", _cut(448)),
        "ckv_cache must have shape (any, 4, 512) as planned, got (64, 4, 448).",
    ),
    "narrow kpe": (
        _tensor("kpe_cache", _cut(32)),
        "kpe_cache must have shape (any, 4, 64) as planned, got (64, 4, 32).",
    ),
    "caches of other lengths": (
        _tensor("kpe_cache", lambda t: t[:63]),
        "ckv_cache and kpe_cache must have the same first extent, got 64 and 63.",
    ),
    "ckv rows of 577 bytes": (
        _tensor("ckv_cache", _rows_of(577)),
        "ckv_cache must have row strides that are multiples of 16 bytes (16 elements of "
        "torch.float8_e4m3fn), got strides (2308, 577, 1).",
    ),
    "kpe rows of 72 bytes": (
        _tensor("kpe_cache", _rows_of(72)),
        "kpe_cache must have row strides that are multiples of 16 bytes (16 elements of "
        "torch.float8_e4m3fn), got strides (288, 72, 1).",
    ),
    "q_nope rows of 516 elements": (
        _tensor("q_nope", _rows_of(516)),
        "q_nope must have row strides that are multiples of 16 bytes (8 elements of "
        "torch.bfloat16), got strides (4128, 516, 1).",
    ),
    "ckv with gaps": (
        _tensor("ckv_cache", _spread),
        "ckv_cache must be contiguous in its last dimension, got strides (4096, 1024, 2).",
    ),
    "q_pe with gaps": (
        _tensor("q_pe", _spread),
        "q_pe must be contiguous in its last dimension, got strides (1024, 128, 2).",
    ),
    "ckv misaligned": (
        _tensor("ckv_cache", _misaligned),
        "ckv_cache must start on a 16-byte boundary, got an address 1 bytes past one.",
    ),
    "q_nope misaligned": (
        _tensor("q_nope", _misaligned),
        "q_nope must start on a 16-byte boundary, got an address 2 bytes past one.",
    ),
    "out misaligned": (
        _tensor("out", _misaligned),
        "out must start on a 16-byte boundary, got an address 2 bytes past one.",
    ),
    "out of another type": (
        _tensor("out", lambda t: t.half()),
        "MLA planned run argument output dtype mismatch: planned torch.bfloat16, got "
        "torch.float16; re-plan with the needed arguments.",
    ),
    "out too small": (
        _tensor("out", lambda t: t[:1]),
        "out must have the 2 query tokens of q_nope, got 1.",
    ),
    "out narrow": (
        _tensor("out", _cut(256)),
        "out must have shape (any, 8, 512) as planned, got (2, 8, 256).",
    ),
    "out with gaps": (
        _tensor("out", _spread),
        "out must be contiguous in its last dimension, got strides (8192, 1024, 2).",
    ),
    "lse FP16": (
        _lse(lambda device: torch.zeros(2, 8, dtype=FP16, device=device)),
        "lse must be torch.float32, got torch.float16.",
    ),
    "lse of another shape": (
        _lse(lambda device: torch.zeros(8, 2, device=device)),
        "lse must have shape (2, 8), got (8, 2).",
    ),
    "lse transposed": (
        _lse(lambda device: torch.zeros(8, 2, device=device).t()),
        "lse must be contiguous, got strides (1, 2).",
    ),
    "ckv_scale 0": (_option(ckv_scale=0.0), "ckv_scale must be a finite positive number, got 0.0."),
    "ckv_scale negative": (
        _option(ckv_scale=-1.0),
        "ckv_scale must be a finite positive number, got -1.0.",
    ),
    "ckv_scale infinite": (
        _option(ckv_scale=float("inf")),
        "ckv_scale must be a finite positive number, got inf.",
    ),
    "kpe_scale NaN": (
        _option(kpe_scale=float("nan")),
        "kpe_scale must be a finite positive number, got nan.",
    ),
    "both kinds of ckv scale": (
        lambda call: (_scale_array(64, 4, 4)(call), call.options.update(ckv_scale=1.0)),
        "Exactly one of ckv_scale or ckv_scale_arr is required when kv_data_type is FP8.",
    ),
    "ckv_scale_arr of another shape": (
        _scale_array(64, 4, 3),
        "ckv_scale_arr must have shape (pages, page_size, head_dim_ckv / 128) = (64, 4, 4), "
        "got (64, 4, 3).",
    ),
    "ckv_scale_arr BF16": (
        _scale_array(64, 4, 4, dtype=BF16),
        "ckv_scale_arr must be torch.float32, got torch.bfloat16.",
    ),
    "ckv_scale_arr with gaps": (
        lambda call: call.options.update(
            ckv_scale_arr=torch.ones(64, 4, 8, device=call.device)[..., :4]
        ),
        "ckv_scale_arr must be contiguous, got strides (32, 8, 1).",
    ),
    "ckv_scale_arr misaligned": (
        lambda call: call.options.update(
            ckv_scale_arr=torch.ones(64 * 16 + 1, device=call.device)[1:].view(64, 4, 4)
        ),
        "ckv_scale_arr must start on a 16-byte boundary, got an address 4 bytes past one.",
    ),
    "output scale": (
        _option(o_scale=1.0),
        "MLA planned run argument o_scale mismatch: planned 'none', got 'per-tensor'; re-plan "
        "with the needed arguments.",
    ),
    "page_table": (
        lambda call: call.options.update(page_table=call.plan["kv_indices"]),
        "page_table is only supported with cutlass backend.",
    ),
}

if FLAT:
    # 0.6 leaves these checks to us; None: its wrapper has no such argument.
    _OTHERWISE = {
        "output of another type": None,
        "sm_scale NaN": "sm_scale must be a finite number that is not negative, got nan.",
        "sm_scale infinite": "sm_scale must be a finite number that is not negative, got inf.",
        "no heads": "num_heads must be a positive int, got 0.",
        "pages do not fit the lengths": (
            "kv_indptr must give request 0 the 3 pages of its 9 tokens, got 2."
        ),
        "fewer indices than pages": (
            "kv_indices must hold the 4 pages that kv_indptr names, got 3."
        ),
        "BMM scales": None,
        "out of another type": (
            "out must have the planned output_dtype=torch.bfloat16, got torch.float16."
        ),
        "both kinds of ckv scale": "ckv_scale or ckv_scale_arr is supported, got both.",
        "output scale": None,
        "page_table": None,
    }

    def _on_this_base(table: dict) -> dict:
        said = {name: (call, _OTHERWISE.get(name, text)) for name, (call, text) in table.items()}
        return {name: (call, text) for name, (call, text) in said.items() if text is not None}

    PLAN, RUN = _on_this_base(PLAN), _on_this_base(RUN)
