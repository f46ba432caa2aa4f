"""One attention problem as a value: its inputs, the float64 answer, and the comparison with it.

`check(Case(...))` is a whole test, and a failing one prints itself as a line to paste in a shell.
"""

import functools
import math
from dataclasses import dataclass, fields

import torch

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Q16 = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda"
CKV = 512
_ROWS_AT_ONCE = 1 << 26  # scores of the reference held at a time

# Largest relative error of one rounding to the 16-bit types (half a unit in the last place).
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Case:
    """A batch: per request `q_lens` query tokens and `kv_lens` cached tokens.

    layout: "sglang" (both caches are slices of one [pages, page_size, 576] array of bytes),
    "separate" (two contiguous arrays) or "layers" (one layer of [pages, layers, page_size, 576]).
    pages: "shuffled", "ordered", or "shared" (requests use each other's pages).
    poison: NaN bytes in every slot that no request references, and wild page numbers after the
    last one used. lse: None, "base2" or "basee".
    """

    q_lens: tuple = (1,)
    kv_lens: tuple = (500,)
    heads: int = 8
    page_size: int = 1
    causal: bool = False
    kv: str = "e4m3"
    q: str = "bf16"
    kpe: int = 64
    layout: str = "sglang"
    pages: str = "shuffled"
    poison: bool = False
    ckv_scale: float | None = None
    kpe_scale: float | None = None
    group_scales: bool = False
    lse: str | None = "base2"
    sm_scale: float = 0.07
    seed: int = 0

    def line(self) -> str:
        """A shell command that repeats this case."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        code = f"from mla_cases import *; check(Case({', '.join(changed)}))"
        return f'PYTHONPATH=tests/gpu:$PYTHONPATH python -c "{code}"'


@dataclass
class Inputs:
    case: Case
    q_nope: torch.Tensor  # [tokens, heads, 512]
    q_pe: torch.Tensor  # [tokens, heads, kpe]
    ckv: torch.Tensor  # [pages, page_size, 512]
    kpe: torch.Tensor  # [pages, page_size, kpe]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len: torch.Tensor
    group_scales: torch.Tensor | None  # [pages, page_size, 4]

    def metadata(self):
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len

    def tensors(self):
        return self.q_nope, self.q_pe, self.ckv, self.kpe


def indptr(lengths, device) -> torch.Tensor:
    values = torch.tensor([0, *lengths], dtype=torch.int32)
    return torch.cumsum(values, 0, dtype=torch.int32).to(device)


def page_counts(case: Case) -> list[int]:
    return [-(-length // case.page_size) for length in case.kv_lens]


def make_pool(case: Case, pages: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches filled with normally distributed values, in the layout of the case."""
    width = CKV + case.kpe
    device = generator.device
    values = torch.randn(
        pages, case.page_size, width, device=device, generator=generator, dtype=torch.float32
    )
    quantized = values.to(FP8[case.kv])
    if case.layout == "separate":
        return quantized[..., :CKV].contiguous(), quantized[..., CKV:].contiguous()
    pool = quantized.view(torch.uint8)
    if case.layout == "layers":
        layers = torch.full(
            (pages, 3, case.page_size, width), 0x7F, device=device, dtype=torch.uint8
        )
        layers[:, 1] = pool
        pool = layers[:, 1]
    pool = pool.view(FP8[case.kv])
    return pool[..., :CKV], pool[..., CKV:]


def make_inputs(case: Case, device=None) -> Inputs:
    """Inputs of a case, the same for the same seed and device (DEVICE if none is given)."""
    device = device or DEVICE
    generator = torch.Generator(device=device).manual_seed(case.seed)
    counts = page_counts(case)
    used = sum(counts)
    pages = used + 4  # page 0 and some others are never referenced
    ckv, kpe = make_pool(case, pages, generator)

    if case.pages == "ordered":
        indices = torch.arange(1, used + 1, device=device)
    else:
        indices = torch.randperm(used, device=device, generator=generator) + 1
        if case.pages == "shared" and used:
            choice = torch.randint(0, used, (used,), device=device, generator=generator)
            indices = indices[choice]
    indices = indices.to(torch.int32)
    if case.poison:
        # Only whole slots count as referenced: the tail of a last page is poisoned as well.
        referenced = torch.zeros(pages, case.page_size, dtype=torch.bool, device=device)
        begin = 0
        for count, length in zip(counts, case.kv_lens, strict=True):
            own = indices[begin : begin + count].long()
            full, rest = divmod(length, case.page_size)
            referenced[own[:full]] = True
            if rest:
                referenced[own[full], :rest] = True
            begin += count
        for cache in (ckv, kpe):
            if cache.shape[-1]:
                cache.view(torch.uint8)[~referenced] = 0x7F
                cache.view(torch.uint8)[:1] |= 0x80
        wild = torch.full((5,), 2**31 - 1, dtype=torch.int32, device=device)
        indices = torch.cat([indices, wild])

    tokens = sum(case.q_lens)
    query = torch.randn(tokens, case.heads, CKV + case.kpe, device=device, generator=generator).to(
        Q16[case.q]
    )
    scales = None
    if case.group_scales:
        scales = torch.rand(pages, case.page_size, CKV // 128, device=device, generator=generator)
        scales = scales * 2 + 0.25
    return Inputs(
        case,
        query[..., :CKV],
        query[..., CKV:],
        ckv,
        kpe,
        indptr(case.q_lens, device),
        indptr(counts, device),
        indices,
        torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        scales,
    )


def gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Tokens of one request, exactly widened to float64."""
    token = torch.arange(length, device=cache.device)
    page_size = cache.shape[1]
    rows = cache.view(torch.uint8)[pages[token // page_size].long(), token % page_size]
    return rows.view(cache.dtype).float().double()


def reference(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64: out [tokens, heads, 512] and natural log-sum-exp [tokens, heads]."""
    case, device = inputs.case, inputs.q_nope.device
    ckv_scale = 1.0 if case.ckv_scale is None else case.ckv_scale
    kpe_scale = 1.0 if case.kpe_scale is None else case.kpe_scale
    out = torch.zeros(inputs.q_nope.shape, dtype=torch.float64, device=device)
    lse = torch.full(inputs.q_nope.shape[:2], -math.inf, dtype=torch.float64, device=device)
    counts = page_counts(case)
    q_begin = page_begin = 0
    for q_len, kv_len, count in zip(case.q_lens, case.kv_lens, counts, strict=True):
        pages = inputs.kv_indices[page_begin : page_begin + count]
        page_begin += count
        begin, q_begin = q_begin, q_begin + q_len
        if q_len == 0 or kv_len == 0:
            continue
        values = gather(inputs.ckv, pages, kv_len)
        if inputs.group_scales is not None:
            token = torch.arange(kv_len, device=device)
            size = inputs.ckv.shape[1]
            scales = inputs.group_scales[pages[token // size].long(), token % size]
            values = values * scales.double().repeat_interleave(128, -1)
        values = values * ckv_scale
        keys = torch.cat([values, gather(inputs.kpe, pages, kv_len) * kpe_scale], -1)
        step = max(1, _ROWS_AT_ONCE // (case.heads * kv_len))
        for first in range(0, q_len, step):
            last = min(first + step, q_len)
            rows = slice(begin + first, begin + last)
            query = torch.cat([inputs.q_nope[rows], inputs.q_pe[rows]], -1).double()
            scores = query.flatten(0, 1) @ keys.T * case.sm_scale
            if case.causal:
                visible = kv_len - q_len + torch.arange(first, last, device=device) + 1
                visible = visible.repeat_interleave(case.heads)[:, None]
                hidden = torch.arange(kv_len, device=device)[None] >= visible
                scores = scores.masked_fill(hidden, -math.inf)
            total = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - total[:, None]).masked_fill(total[:, None].isneginf(), 0)
            out[rows] = (weights @ values).view(last - first, case.heads, CKV)
            lse[rows] = total.view(last - first, case.heads)
    return out, lse


@functools.cache
def workspace() -> torch.Tensor:
    """One float workspace for every wrapper of the process, as SGLang has it."""
    return torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)


def new_wrapper(backend="auto", **kwargs):
    import flashinfer.mla

    return flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(), backend=backend, **kwargs)


def plan(wrapper, inputs: Inputs, kv_dtype=None) -> None:
    """The flat positional plan as SGLang calls it."""
    case = inputs.case
    wrapper.plan(
        *inputs.metadata(),
        case.heads,
        CKV,
        case.kpe,
        case.page_size,
        case.causal,
        case.sm_scale,
        Q16[case.q],
        kv_dtype or FP8[case.kv],
    )


def run_planned(wrapper, inputs: Inputs, out=None):
    """(out, lse) of a planned wrapper; lse is None if the case asks for none."""
    case = inputs.case
    options = {}
    if case.ckv_scale is not None:
        options["ckv_scale"] = case.ckv_scale
    if case.kpe_scale is not None:
        options["kpe_scale"] = case.kpe_scale
    if inputs.group_scales is not None:
        options["ckv_scale_arr"] = inputs.group_scales
    if case.lse is not None:
        options.update(return_lse=True, return_lse_base_on_e=case.lse == "basee")
    result = wrapper.run(*inputs.tensors(), out=out, **options)
    return result if case.lse is not None else (result, None)


def is_ours(wrapper) -> bool:
    """Whether our kernel has taken the wrapper's last plan."""
    from mla_fp8kv.module import StagedModule

    return isinstance(wrapper._cached_module, StagedModule)


def run(inputs: Inputs, backend="auto"):
    wrapper = new_wrapper(backend)
    plan(wrapper, inputs)
    assert is_ours(wrapper), "not our kernel"
    return run_planned(wrapper, inputs)


def run_cast(inputs: Inputs, backend: str) -> torch.Tensor:
    """What SGLang does today: cast the whole pool to the query dtype, then upstream's kernel."""
    dtype = Q16[inputs.case.q]
    wrapper = new_wrapper(backend)
    plan(wrapper, inputs, kv_dtype=dtype)
    q_nope, q_pe, ckv, kpe = inputs.tensors()
    return wrapper.run(q_nope, q_pe, ckv.to(dtype), kpe.to(dtype))


def error_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm())


def compare(case: Case, got, got_lse, want, want_lse) -> list[str]:
    """Everything wrong with a result, as sentences; empty when it is right.

    Where the bounds come from: u is the largest relative error of rounding to the output type and
    h that of FP16, in which P and the partial results are held; a rounding's root mean square is
    0.42 of its largest. Q, K and V enter the products exactly.
    """
    u, h = UNIT[Q16[case.q]], UNIT[torch.float16]
    problems = []

    def require(ok, text):
        if not bool(ok):
            problems.append(text)

    require(got.shape == want.shape and got.dtype == Q16[case.q], "shape or dtype of out")
    empty = want_lse.isneginf()
    got, live, wanted = got.double(), ~empty, want
    require((got[empty] == 0).all(), "rows that see no token are not 0")
    got, wanted = got[live], wanted[live]
    require(got.isfinite().all(), "out is not finite")
    if got.numel():
        diff = got - wanted
        norm = wanted.norm(dim=-1)
        relative = float(diff.norm() / wanted.norm())
        require(relative <= 0.55 * u + h, f"relative error {relative:.2e} over all rows")
        row = float((diff.norm(dim=-1) / norm).max())
        require(row <= u + 2 * h, f"relative error {row:.2e} in one row")
        # Rounding the element itself, then the noise of P, a part of the row's own magnitude; with
        # group scales, where P is rounded once more, of that of the group of dims if it is larger.
        size = norm[..., None] / math.sqrt(CKV)
        if case.group_scales:
            groups = wanted.unflatten(-1, (-1, 128)).norm(dim=-1) * math.sqrt(2 / 128)
            size = size.maximum(groups.repeat_interleave(128, -1))
        allowed = u * wanted.abs() + 8 * h * size
        worst = float((diff.abs() / allowed).max())
        require(worst <= 1, f"an element is {worst:.2f} of the absolute bound off")
        cosine = 1 - (got * wanted).sum(-1) / (got.norm(dim=-1) * norm)
        # An error of relative size e turns a vector by at most e: 1 - cos <= e^2 / 2.
        require(
            float(cosine.nan_to_num(nan=1.0).max()) <= 0.5 * (u + 2 * h) ** 2,
            f"cosine {1 - float(cosine.max()):.7f} in one row",
        )
    if got_lse is not None:
        factor = 1.0 if case.lse == "basee" else math.log2(math.e)
        require((got_lse[empty] == -math.inf).all(), "lse of rows that see no token is not -inf")
        diff = (got_lse.double() - want_lse * factor)[live].abs()
        if diff.numel():
            # The sum of P may be a sum of FP16 values; scores are FP32.
            allowed = 2 * h + 2e-6 * (want_lse[live] * factor).abs()
            require((diff <= allowed).all(), f"lse is {float(diff.max()):.2e} off")
    return problems


def check(case: Case, backend="auto") -> Inputs:
    """Run a case and compare it with float64; AssertionError with the one-line reproduction."""
    inputs = make_inputs(case)
    problems = compare(case, *run(inputs, backend), *reference(inputs))
    assert not problems, f"{'; '.join(problems)}\nrepeat with: {case.line()}"
    return inputs
