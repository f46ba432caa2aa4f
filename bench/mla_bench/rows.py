"""What is measured: shapes (rows), and ways our kernel is built or planned (variants).

No torch here, so that tests and plots need none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
TOKEN_BYTES = HEAD_DIM_CKV + HEAD_DIM_KPE  # one FP8 byte an element
SCALE_BYTES = 4 * (HEAD_DIM_CKV // 128)  # FP32, one for each 128 channels of a token
POOL_TOKENS = 495_552  # the pool of one layer in the deployment that started this project
LAYERS = 8  # pools in one graph: beyond ~8 MB of KV a layer no row is found in L2 again


@dataclass(frozen=True)
class Row:
    """One shape: `batch` requests of `kv_lens` tokens, each with `qo_len` queries of `heads` heads.

    Attributes:
        heads: query heads a GPU holds.
        kv_lens: KV length of each request, in tokens.
        qo_len: queries a request (1: decode; a few: speculative verify; many: prefill).
        causal: query i of a request sees `kv_len - qo_len + i + 1` tokens.
        page_size: tokens a page; the page table is random.
        kv_dtype: "e4m3" or "e5m2".
        group_scales: per token and 128 channels (`ckv_scale_arr`) instead of one scale of 1.
        label: what `kv_lens` looks like where it is not uniform ("skewed", "ragged"), else "".
        group: "core" rows get every variant, "serving" rows those of this GPU only.
        target_us: goal on the H200, fixed before the first measurement; None: none set.
    """

    heads: int
    kv_lens: tuple[int, ...]
    qo_len: int = 1
    causal: bool = False
    page_size: int = 1
    kv_dtype: str = "e4m3"
    group_scales: bool = False
    label: str = ""
    group: str = "core"
    target_us: float | None = None

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def kv_len(self) -> int:
        """The longest request, in tokens."""
        return max(self.kv_lens)

    @property
    def kv_tokens(self) -> int:
        return sum(self.kv_lens)

    @property
    def name(self) -> str:
        """Unique and stable: what `--rows` selects and what two variants of a row share."""
        parts = [f"h{self.heads}", f"b{self.batch}", f"kv{self.kv_len}"]
        if self.label:
            parts.append(self.label)
        if self.qo_len != 1:
            parts.append(f"q{self.qo_len}")
        if self.page_size != 1:
            parts.append(f"page{self.page_size}")
        if self.kv_dtype != "e4m3":
            parts.append(self.kv_dtype)
        if self.group_scales:
            parts.append("group")
        return "-".join(parts)


@dataclass(frozen=True)
class Variant:
    """One way to build or plan our kernel, selected by environment variables alone.

    Attributes:
        name: as `--variants` selects it and the results name it.
        env: variables set while planning; those of `BUILD_VARIABLES` select another module.
        backend: the wrapper's `backend` argument.
        note: one line for the reader of the results.
        core_only: leave the serving rows out.
    """

    name: str
    env: dict[str, str] = field(default_factory=dict)
    backend: str = "fa2"
    note: str = ""
    core_only: bool = False

    def loads_only_env(self) -> dict[str, str]:
        """The same grid and access pattern with no math (so the dequant choice is immaterial)."""
        env = {key: value for key, value in self.env.items() if key != "MLA_FP8KV_DEQUANT"}
        return env | {"MLA_FP8KV_LOADS_ONLY": "1"}


# The former choose a compiled module, the latter only change the plan.
BUILD_VARIABLES = ("MLA_FP8KV_DEQUANT", "MLA_FP8KV_LOADS_ONLY")
PLAN_VARIABLES = (
    "MLA_FP8KV_SMEM_LIMIT",
    "MLA_FP8KV_CTAS_PER_SM",
    "MLA_FP8KV_TILE_ROWS",
    "MLA_FP8KV_WGMMA",
)

NATIVE = "native"
_LIMIT_100K = {"MLA_FP8KV_SMEM_LIMIT": "101376"}
_LIMIT_A100 = {"MLA_FP8KV_SMEM_LIMIT": "166912"}
_ONE_CTA = {"MLA_FP8KV_CTAS_PER_SM": "1"}
_BITS = {"MLA_FP8KV_DEQUANT": "bits"}


def _other_gpu(name: str, env: dict[str, str], note: str) -> Variant:
    return Variant(name, env, note=note, core_only=True)


VARIANTS = (
    Variant(NATIVE, note="what this GPU uses"),
    Variant("auto", backend="auto", note="what backend='auto' picks for the shape"),
    _other_gpu("mma", {"MLA_FP8KV_WGMMA": "0"}, "mma.sync for all tiles, as on SM100 and SM103"),
    _other_gpu("smem100k", _LIMIT_100K, "the tiles of SM86/89/120/121, as many CTAs as fit here"),
    _other_gpu("smem100k-1cta", _LIMIT_100K | _ONE_CTA, "the same, one CTA an SM as there"),
    _other_gpu("smem163k", _LIMIT_A100, "the tiles of SM80, as many CTAs as fit here"),
    _other_gpu("bits", _BITS, "mma with bit placement, as on SM80/86, instead of the conversion"),
    _other_gpu("like-sm86", _LIMIT_100K | _ONE_CTA | _BITS, "the limits of SM86 at once"),
    _other_gpu("like-sm80", _LIMIT_A100 | _ONE_CTA | _BITS, "the limits of SM80 at once"),
)


def _uniform(heads: int, batch: int, kv_len: int, qo_len: int = 1, **more) -> Row:
    return Row(heads, (kv_len,) * batch, qo_len, causal=qo_len > 1, **more)


def _ragged(low: int, high: int, batch: int) -> tuple[int, ...]:
    """The same `batch` lengths in [low, high] on every machine, the longest being `high`."""
    draw = random.Random(f"{low}-{high}-{batch}")
    return (high, *(draw.randint(low, high) for _ in range(batch - 1)))


# The goal of the rows was given. The others follow the same line, fixed before anything
# ran: a share of the floor (at the H200's 4.22 TB/s) and a constant for launch and merge.
_H200_COPY_GBPS = 4220.0


def _goal_us(row: Row) -> float:
    rows = row.heads * row.qo_len
    share, constant = (1.06, 4.5) if rows <= 8 else (1.15, 5.5) if rows <= 16 else (1.25, 6)
    floor = row.kv_tokens * TOKEN_BYTES / (_H200_COPY_GBPS * 1e3)
    goal = share * floor + constant
    if row.label:
        goal += 1.0  # uneven lengths leave some CTAs idle at the end
    if row.group_scales:
        goal *= 1.1  # 16 more bytes a token and a multiply a score and a probability
    return round(goal, 1)


def _serving(heads: int, kv_lens: tuple[int, ...], **more) -> Row:
    row = Row(heads, kv_lens, group="serving", **more)
    return replace(row, target_us=_goal_us(row))


ROWS = (
    _uniform(8, 1, 500, target_us=4.5),
    _uniform(8, 1, 4096, target_us=6.5),
    _uniform(8, 1, 32_768, target_us=10),
    _uniform(8, 1, 131_072, target_us=23.5),
    _uniform(16, 16, 4096, target_us=16),
    _uniform(8, 32, 8192, target_us=42),
    _uniform(16, 32, 8192, target_us=46),
    _uniform(16, 16, 4096, 4, target_us=24),
    _uniform(64, 32, 8192, target_us=95),
    _uniform(128, 16, 4096, target_us=52),
    _uniform(128, 32, 8192, target_us=180),
    _uniform(8, 1, 500, 256, target_us=30),
    # A layer's pool holds 495,552 tokens, so 128 requests stop at 3072 tokens each and 256 at 1536.
    *(
        _serving(heads, (kv_len,) * batch)
        for batch, kv_len in (
            (64, 1024),
            (64, 4096),
            (128, 1024),
            (128, 3072),
            (256, 1024),
            (256, 1536),
        )
        for heads in (8, 16)
    ),
    *(_serving(heads, _ragged(1024, 4096, 128), label="ragged") for heads in (8, 16)),
    *(_serving(heads, (65_536,) + (512,) * 31, label="skewed") for heads in (8, 16)),
    _serving(8, (8192,) * 32, page_size=64),
    _serving(16, (4096,) * 16, page_size=64),
    _serving(12, (8192,) * 32),
    _serving(20, (8192,) * 32),
    # 32 rows, plain and as verification of four draft tokens of a few or more requests.
    *(
        replace(row, group="core")
        for row in (
            _serving(32, (8192,) * 32),
            _serving(8, (4096,) * 16, qo_len=4, causal=True),
            _serving(16, (4096,) * 4, qo_len=4, causal=True),
        )
    ),
    _serving(16, (131_072,)),
    _serving(8, (8192,) * 32, group_scales=True),
    _serving(16, (4096,) * 16, group_scales=True),
    _serving(8, (8192,) * 32, kv_dtype="e5m2"),
    _serving(16, (4096,) * 16, kv_dtype="e5m2"),
)


def extra_variant(text: str) -> Variant:
    """The variant of "NAME:VARIABLE=VALUE[,...]", to try a build or plan variable in one run."""
    name, _, assignments = text.partition(":")
    env = dict(item.partition("=")[::2] for item in assignments.split(","))
    known = BUILD_VARIABLES + PLAN_VARIABLES
    if not name or not all(key in known and value for key, value in env.items()):
        raise ValueError(
            f"an extra variant is NAME:VARIABLE=VALUE[,...] with {', '.join(known)}, got {text!r}."
        )
    if name in {variant.name for variant in VARIANTS}:
        raise ValueError(f"{name} is a variant already.")
    return Variant(name, env, note=text)


QUICK_ROWS = ("h8-b1-kv500", "h16-b16-kv4096", "h8-b32-kv8192", "h128-b32-kv8192")


def select(items, names: str | None, what: str) -> tuple:
    """The items a comma-separated list names, in their own order; None: all, "none": none of them.

    A name may be a group ("core", "serving") where the items have one. An unknown name is refused.
    """
    if names is None or names == "none":
        return tuple(items) if names is None else ()
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    groups = {item.group for item in items if hasattr(item, "group")}
    known = {item.name for item in items} | groups
    unknown = sorted(wanted - known)
    if unknown:
        raise ValueError(
            f"unknown {what} {', '.join(unknown)}: known are {', '.join(sorted(known))}."
        )
    return tuple(i for i in items if i.name in wanted or getattr(i, "group", None) in wanted)
