"""The tensors of one row on the GPU: KV pools, page tables, queries, and the float64 answer."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .rows import HEAD_DIM_CKV, LAYERS, POOL_TOKENS, TOKEN_BYTES, Row

KV_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
QUERY_DTYPE = torch.bfloat16
SM_SCALE = 1 / math.sqrt(192)  # DeepSeek's: the dims of a query head before absorption
WORKSPACE_BYTES = 384 << 20  # what SGLang gives FlashInfer
_WORKSPACE_STEP = 256
_MOST_PLANS = 1 << 14
_workspace_numbers = itertools.count()


class Pools:
    """The KV pools of all layers in one FP8 format, filled with fresh random data.

    Attributes:
        fp8: `layers` tensors [tokens, 576] in `dtype`.
    """

    def __init__(
        self,
        kv_dtype: str,
        device: str = "cuda",
        tokens: int = POOL_TOKENS,
        layers: int = LAYERS,
        seed: int = 0,
    ):
        self.kv_dtype = kv_dtype
        self.dtype = KV_DTYPES[kv_dtype]
        self.device = device
        self.tokens = tokens
        self.generator = torch.Generator(device).manual_seed(seed)
        self.fp8 = [self._filled() for _ in range(layers)]

    def _filled(self) -> torch.Tensor:
        pool = torch.empty(self.tokens, TOKEN_BYTES, dtype=self.dtype, device=self.device)
        # In pieces: a whole pool of BF16 noise would be twice the pool.
        for piece in pool.split(1 << 16):
            noise = torch.empty(piece.shape, dtype=torch.bfloat16, device=self.device)
            piece.copy_(noise.normal_(generator=self.generator).clamp_(-4, 4))
        return pool

    @cached_property
    def bf16(self) -> list[torch.Tensor]:
        """The same values as BF16 pools [tokens, 576], for the 16-bit baselines."""
        return [pool.to(torch.bfloat16) for pool in self.fp8]

    @cached_property
    def staging(self) -> torch.Tensor:
        """One BF16 pool that the cast baselines fill anew in every layer."""
        return torch.empty(self.tokens, TOKEN_BYTES, dtype=torch.bfloat16, device=self.device)

    @cached_property
    def _workspaces(self) -> torch.Tensor:
        size = WORKSPACE_BYTES + _MOST_PLANS * _WORKSPACE_STEP
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def workspace(self) -> torch.Tensor:
        """A float workspace at an address that no plan of this process had before.

        A captured launch binds the tile of later plans for the same workspace, so that a plan must
        not meet the address of an earlier one. They overlap: only one plan runs at a time.
        """
        begin = next(_workspace_numbers) * _WORKSPACE_STEP
        return self._workspaces[begin : begin + WORKSPACE_BYTES]

    @cached_property
    def group_scales(self) -> list[torch.Tensor]:
        """FP32 scales [tokens, 4] in 0.5..2, one array a layer."""
        return [
            torch.rand(self.tokens, 4, device=self.device, generator=self.generator) * 1.5 + 0.5
            for _ in self.fp8
        ]


def caches(pool: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ckv, kpe [pages, page_size, 512 | 64] as slices of a pool [tokens, 576], as in SGLang."""
    paged = pool.view(-1, page_size, TOKEN_BYTES)
    return paged[..., :HEAD_DIM_CKV], paged[..., HEAD_DIM_CKV:]


@dataclass(frozen=True)
class PageTable:
    """Pages of all requests: request b owns `indices[indptr[b]:indptr[b + 1]]`, both int32."""

    page_size: int
    indptr: torch.Tensor
    indices: torch.Tensor

    def slots(self, kv_lens: tuple[int, ...]) -> torch.Tensor:
        """Pool rows of every token, requests one after another, int64."""
        offsets = torch.arange(self.page_size, device=self.indices.device)
        slots = []
        for b, length in enumerate(kv_lens):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            slots.append((pages[:, None] * self.page_size + offsets).flatten()[:length])
        return torch.cat(slots)

    def dense(self) -> torch.Tensor:
        """int32 [batch, most pages of a request]; the entries past a request's end are 0."""
        counts = self.indptr.diff()
        table = self.indices.new_zeros(len(counts), int(counts.max()))
        for b, count in enumerate(counts.tolist()):
            table[b, :count] = self.indices[self.indptr[b] : self.indptr[b] + count]
        return table


def _indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Case:
    """A row's queries, lengths, page tables and output on top of the pools.

    Attributes:
        q: [batch * qo_len, heads, 576] BF16; the run calls take its two slices.
        out: [batch * qo_len, heads, 512] BF16, written by whatever ran last.
        kv_lens: int32 [batch], on the GPU.
        qo_indptr: int32 [batch + 1], on the GPU.
    """

    def __init__(self, row: Row, pools: Pools):
        if row.kv_dtype != pools.kv_dtype:
            raise ValueError(f"row {row.name} needs {row.kv_dtype} pools, got {pools.kv_dtype}.")
        self.row = row
        self.pools = pools
        device, generator = pools.device, pools.generator
        rows = row.batch * row.qo_len
        q = torch.empty(rows, row.heads, TOKEN_BYTES, dtype=QUERY_DTYPE, device=device)
        self.q = q.normal_(generator=generator)
        self.out = torch.empty(rows, row.heads, HEAD_DIM_CKV, dtype=QUERY_DTYPE, device=device)
        self.kv_lens = torch.tensor(row.kv_lens, dtype=torch.int32, device=device)
        self.qo_indptr = _indptr([row.qo_len] * row.batch).to(device)
        self._tables: dict[int, PageTable] = {}
        self._references: dict[int, dict[int, torch.Tensor]] = {}

    @property
    def table(self) -> PageTable:
        return self.table_of(self.row.page_size)

    def table_of(self, page_size: int) -> PageTable:
        """A random page table; the same one at every call for a page size."""
        if page_size not in self._tables:
            counts = [-(-length // page_size) for length in self.row.kv_lens]
            pages = torch.randperm(
                self.pools.tokens // page_size,
                device=self.pools.device,
                generator=self.pools.generator,
            )
            if sum(counts) > len(pages):
                raise ValueError(
                    f"row {self.row.name} needs {sum(counts)} pages of {page_size} tokens, "
                    f"the pool has {len(pages)}."
                )
            self._tables[page_size] = PageTable(
                page_size, _indptr(counts).to(self.pools.device), pages[: sum(counts)].int()
            )
        return self._tables[page_size]

    def linear_table(self) -> PageTable:
        """Page size 1, token after token: the table of a gathered copy."""
        tokens = torch.arange(self.row.kv_tokens, dtype=torch.int32, device=self.pools.device)
        return replace(self.table_of(1), indices=tokens)

    @property
    def group_scales(self) -> list[torch.Tensor]:
        """`ckv_scale_arr` [pages, page_size, 4] of each layer."""
        return [scale.view(-1, self.row.page_size, 4) for scale in self.pools.group_scales]

    def relative_error(self, out: torch.Tensor, page_size: int) -> float:
        """||out - exact|| / ||exact|| over up to four requests.

        Args:
            out: output of layer 0 in any shape with the elements of `self.out`.
            page_size: page size of the table whose tokens were attended to.

        NaN or inf anywhere in the checked requests gives NaN or inf, never a good number.
        """
        if page_size not in self._references:
            self._references[page_size] = self._reference(self.table_of(page_size))
        out = out.view(self.row.batch, self.row.qo_len, self.row.heads, HEAD_DIM_CKV)
        pairs = [(out[b].double(), exact) for b, exact in self._references[page_size].items()]
        squared = sum((got - exact).square().sum() for got, exact in pairs)
        return float((squared / sum(exact.square().sum() for _, exact in pairs)).sqrt())

    def _reference(self, table: PageTable) -> dict[int, torch.Tensor]:
        """Float64 attention over layer 0 for up to four requests: {b: [qo_len, heads, 512]}."""
        row = self.row
        checked = sorted({0, row.batch // 3, 2 * row.batch // 3, row.batch - 1})
        slots = table.slots(row.kv_lens).split(list(row.kv_lens))
        answer = {}
        for b in checked:
            kv = self.pools.fp8[0].view(torch.uint8)[slots[b]].view(self.pools.dtype).double()
            if row.group_scales:
                scale = self.pools.group_scales[0][slots[b]].double().repeat_interleave(128, 1)
                kv[:, :HEAD_DIM_CKV] *= scale
            q = self.q[b * row.qo_len : (b + 1) * row.qo_len].double()
            answer[b] = attention(q, kv, row.causal)
        return answer


def attention(q: torch.Tensor, kv: torch.Tensor, causal: bool) -> torch.Tensor:
    """Exact MLA attention of one request.

    Args:
        q: [qo_len, heads, 576] float64.
        kv: [kv_len, 576] float64; its first 512 columns are the values.
        causal: query i sees the tokens before `kv_len - qo_len + i + 1`.

    Returns:
        [qo_len, heads, 512] float64.
    """
    scores = torch.einsum("qhd,td->qht", q, kv) * SM_SCALE
    if causal:
        last = torch.arange(len(q), device=q.device) + len(kv) - len(q)
        hidden = torch.arange(len(kv), device=q.device) > last[:, None]
        scores.masked_fill_(hidden[:, None], -math.inf)
    return torch.einsum("qht,td->qhd", scores.softmax(-1), kv[:, :HEAD_DIM_CKV])
