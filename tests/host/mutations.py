"""Puts one-line faults into copies of the kernel and shows that the host tests find each.

Run by `./build.sh test --mutations`; arguments choose mutations by a part of their name. Prints one
line a mutation, killed or survived, and a total. Exit status 0: all killed, and the same tests pass
without a fault. 1: one survived. 2: a mutation no longer fits the sources, or does not compile.

A fault is a search and replacement on source text, blind to how the text is broken into lines. The
text must occur exactly once.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from host_library import DOES_NOT_COMPILE, HERE, KERNEL

TESTS_FAILED = 1  # exit status of pytest

# ---- tests that take a second or two, as pytest names them
VARIANT = "test_variants[{}, {}, grid 3]"
E4M3 = [VARIANT.format("Rows8", "e4m3")]
PLACED = [VARIANT.format("Rows8", "e4m3 placed")]
SCALED = [VARIANT.format("Rows8", "scales")]
SPLIT = ["test_variants[Rows8, e4m3, grid 40]"]
SHARED_LOADS = [VARIANT.format("Rows32", "e4m3")]  # its warps read rows that others fetched
WGMMA = [VARIANT.format("WgmmaRows64", "e4m3")]
WGMMA_32 = [VARIANT.format("WgmmaRows32", "e4m3")]
STAGGERED = ["test_staggered[e4m3]"]  # many tiles, references that rise in either half
TWO_BLOCKS = [VARIANT.format("Rows64", "e4m3")]  # its warps take two token blocks


@dataclasses.dataclass
class Mutation:
    name: str
    file: str
    search: str
    replace: str
    tests: list[str]


MUTATIONS = [
    # ---- conversion and fragment maps
    Mutation(
        "V: bytes paired along dims instead of tokens",
        "dequant.cuh",
        "ptx::byte_permute(word, 0, 0x3120)",
        "ptx::byte_permute(word, 0, 0x3210)",
        E4M3,
    ),
    Mutation(
        "V placed: even and odd dims exchanged",
        "dequant.cuh",
        "alternate(word, first, second); } };",
        "alternate(word, second, first); } };",
        PLACED,
    ),
    Mutation(
        "placed bits: sign of the odd bytes lost",
        "dequant.cuh",
        "p13 = ptx::select_bits(kMagnitudes, word >> 1, signs);",
        "p13 = ptx::select_bits(kMagnitudes, word >> 1, 0);",
        PLACED,
    ),
    Mutation(
        "e5m2: even bytes not shifted",
        "dequant.cuh",
        "p02 = ptx::byte_permute(word, 0, 0x2404);",
        "p02 = word & 0xff00ff00u;",
        [VARIANT.format("Rows8", "e5m2")],
    ),
    Mutation(
        "Q not permuted to the order of the k index",
        "attend.cuh",
        "constexpr bool kAlternate = Widen<F, D>::kAlternatePairs;",
        "constexpr bool kAlternate = false;",
        ["test_all_codes_as_key[Rows8-e4m3 placed]"],
    ),
    Mutation(
        "FP16 Q not permuted to the order of the k index",
        "attend.cuh",
        "{ptx::byte_permute(a, b, 0x5410),",
        "{ptx::byte_permute(a, b, 0x3210),",
        PLACED,
    ),
    Mutation(
        "Q: the two pairs of a fragment exchanged",
        "attend.cuh",
        "return {ptx::pack_f16x2(x[0], x[kAlternate ? 2 : 1]), "
        "ptx::pack_f16x2(x[kAlternate ? 1 : 2], x[3])};",
        "return {ptx::pack_f16x2(x[kAlternate ? 1 : 2], x[3]), "
        "ptx::pack_f16x2(x[0], x[kAlternate ? 2 : 1])};",
        E4M3,
    ),
    Mutation(
        "Q: a warp without a piece stores one",
        "attend.cuh",
        "if (!has_piece(i)) return;",
        "",
        E4M3,
    ),
    Mutation(
        "K: rows g and g+8 exchanged",
        "attend.cuh",
        "k[b][i >> 1][i & 1], k[b][i >> 1][(i & 1) + 2]",
        "k[b][i >> 1][~i & 1], k[b][i >> 1][(~i & 1) + 2]",
        E4M3,
    ),
    Mutation(
        "output: dims of a lane not interleaved",
        "attend.cuh",
        "p_.out + warp_ * T::kWarpDims + 2 * g_ +",
        "p_.out + warp_ * T::kWarpDims + 2 * (g_ ^ 1) +",
        E4M3,
    ),
    Mutation(
        "output: warps' dims in the wrong order",
        "attend.cuh",
        "p_.out + warp_ * T::kWarpDims + 2 * g_ +",
        "p_.out + (warp_ ^ 1) * T::kWarpDims + 2 * g_ +",
        E4M3,
    ),
    Mutation(
        "partial output: dims of a lane not interleaved",
        "attend.cuh",
        "T::kRows + row) * kCkvDim + warp_ * T::kWarpDims + 2 * g_;",
        "T::kRows + row) * kCkvDim + warp_ * T::kWarpDims + 2 * (g_ ^ 1);",
        SPLIT,
    ),
    Mutation(
        "swizzle with the wrong row bits",
        "load.cuh",
        "T::kStaggered ? row & 7 : (row >> 1) & 3;",
        "T::kStaggered ? row & 7 : row & 3;",
        ["test_no_bank_conflicts[Rows8-e4m3]"],
    ),
    Mutation(
        "swizzle of staggered rows with the wrong row bits",
        "load.cuh",
        "T::kStaggered ? row & 7 : (row >> 1) & 3;",
        "T::kStaggered ? row & 3 : (row >> 1) & 3;",
        ["test_no_bank_conflicts[WgmmaRows64-e4m3]"],
    ),
    Mutation(
        "kpe swizzled otherwise than ckv",
        "load.cuh",
        "(chunk ^ ((row >> 1) & 3)) * kChunkBytes",
        "(chunk ^ (row & 3)) * kChunkBytes",
        E4M3,
    ),
    # ---- mask and ends
    Mutation(
        "lower tokens not masked",
        "attend.cuh",
        "if (token >= end) score_[b][n][c] = kMasked;",
        "",
        E4M3,
    ),
    Mutation(
        "upper tokens not masked",
        "attend.cuh",
        "if (token + 8 >= end) score_[b][n][c + 2] = kMasked;",
        "",
        E4M3,
    ),
    Mutation(
        "one token too many",
        "attend.cuh",
        "const int end = causal < item.kv_end ? causal : item.kv_end;",
        "const int end = (causal < item.kv_end ? causal : item.kv_end) + 1;",
        E4M3,
    ),
    Mutation(
        "last tile taken for a full one",
        "attend.cuh",
        "position + T::kTokens > (",
        "position + T::kTokens > 1 + (",
        ["test_kv_len_at_tile_edges[Rows8, 63 tokens]"],
    ),
    Mutation(
        "causal end of the first row taken for the end of the tile",
        "attend.cuh",
        "static_cast<int>(divide(item.row_begin, p_.heads))",
        "static_cast<int>(divide(item.row_begin + T::kRows - 1, p_.heads))",
        ["test_causal[Rows64, q 2, kv 64]"],
    ),
    Mutation(
        "all heads of a tile masked as its first",
        "attend.cuh",
        "divide(item.row_begin + qk_row(n, c), p_.heads)",
        "divide(item.row_begin, p_.heads)",
        ["test_causal[Rows64, q 2, kv 65]"],
    ),
    # ---- softmax
    Mutation(
        "output not rescaled when the reference moves",
        "attend.cuh",
        "out_[d][n][c] *= shrink[c & 1];",
        "out_[d][n][c] *= 1.f;",
        ["test_moving_maximum[Rows8-rising-6-2]"],
    ),
    Mutation(
        "sum not rescaled when the reference moves",
        "attend.cuh",
        "sum_[own][c] *= shrink[c];",
        "",
        ["test_moving_maximum[Rows8-rising-6-2]"],
    ),
    Mutation(
        "reference never moves",
        "attend.cuh",
        "exceeds |= x > kSlack;",
        "",
        ["test_moving_maximum[Rows8-rising-6-2]"],
    ),
    Mutation(
        "row scale of Q not undone",
        "attend.cuh",
        "p_.score_scale * Widen<F, D>::kScale * scale_down",
        "p_.score_scale * Widen<F, D>::kScale",
        E4M3,
    ),
    Mutation(
        "row scale of Q from one warp's share only",
        "attend.cuh",
        "largest = ptx::max(largest, x[i]);",
        "largest = x[0];",
        ["test_outliers_in_a_row_of_q[Rows8]"],
    ),
    # ---- scales and LSE
    Mutation(
        "ckv_scale applied twice",
        "attend.cuh",
        "store_out(item, row, n, c, scale * p_.out_scale);",
        "store_out(item, row, n, c, scale * p_.out_scale * p_.out_scale);",
        ["test_scales[both small, e4m3, Rows8]"],
    ),
    Mutation(
        "ckv_scale missing in the merge",
        "merge.cuh",
        "ptx::divide(p.out_scale, sum)",
        "ptx::divide(1.f, sum)",
        ["test_scales[both small, e4m3, Rows8]"],
    ),
    Mutation(
        "kpe_scale ignored",
        "attend.cuh",
        "scale_all(acc, p_.pe_ratio);",
        ";",
        ["test_scales[unequal, e4m3, Rows8]"],
    ),
    Mutation(
        "LSE in base 2 always",
        "attend.cuh",
        "lse * p_.lse_scale",
        "lse",
        ["test_lse[Rows8, natural, grid 1]"],
    ),
    Mutation(
        "merged LSE in base 2 always",
        "merge.cuh",
        "lse * p.lse_scale",
        "lse",
        ["test_lse[Rows8, natural, grid 3]"],
    ),
    Mutation(
        "group scale of the first group for all",
        "attend.cuh",
        "add_scaled_group(slot, pair / kPairsPerGroup, acc);",
        "add_scaled_group(slot, 0, acc);",
        SCALED,
    ),
    Mutation(
        "kpe scaled as the first group",
        "attend.cuh",
        "if constexpr (T::kGroupScales) move_to_scores(acc);",
        "",
        SCALED,
    ),
    Mutation(
        "group scales of P along the wrong token pair",
        "attend.cuh",
        "const int token = 16 * k + 8 * half + 2 * t_;",
        "const int token = 16 * k + 2 * t_;",
        SCALED,
    ),
    # ---- NaN
    Mutation(
        "placed bits: NaN of the upper rows put on the lower",
        "attend.cuh",
        "if (found & (c < 2 ? 1u : 2u))",
        "if (found & 1u)",
        ["test_nan_codes_in_referenced_slots[Rows8-e4m3 placed]"],
    ),
    Mutation(
        "placed bits: negative NaN overlooked",
        "dequant.cuh",
        "seen |= word - signs + 0x01010101u;",
        "seen |= (word - signs + 0x01010101u) & ~word;",
        ["test_nan_codes_in_referenced_slots[Rows8-e4m3 placed]"],
    ),
    # ---- loads
    Mutation(
        "page table of the item before",
        "load.cuh",
        "walk_ = following_;",
        "following_.page_begin = walk_.page_begin; walk_ = following_;",
        E4M3,
    ),
    Mutation(
        "page indices of the tile before",
        "load.cuh",
        "locate(tile, page); fetch_index();",
        "locate(tile, page); if (lane_ > 64) fetch_index(); else { next_ = walk_; step(); }",
        E4M3,
    ),
    Mutation(
        "token within the page ignored",
        "load.cuh",
        "token - divide(token, p_.page_size) * p_.page_size.value",
        "0",
        E4M3,
    ),
    Mutation(
        "upper rows located as the lower ones",
        "load.cuh",
        "warp_ * T::kWarpTokens + lane_ % T::kWarpTokens",
        "warp_ * T::kWarpTokens + lane_ % 8",
        E4M3,
    ),
    Mutation(
        "page table read beyond the request",
        "load.cuh",
        "token < tile.end ? token : tile.end - 1",
        "token",
        ["test_kv_len_at_tile_edges[Rows8, 65 tokens]"],
    ),
    # ---- order
    Mutation(
        "wait for the own rows dropped",
        "kernel.cuh",
        "ptx::cp_async_wait<(T::kSlots - 1) * kGroups>(); ptx::sync_warp();",
        "ptx::sync_warp();",
        E4M3,
    ),
    Mutation(
        "wait for the own rows one group short",
        "kernel.cuh",
        "ptx::cp_async_wait<(T::kSlots - 1) * kGroups>(); ptx::sync_warp();",
        "ptx::cp_async_wait<(T::kSlots - 1) * kGroups + 1>(); ptx::sync_warp();",
        E4M3,
    ),
    Mutation(
        "wait for the page indices and the next shared tile dropped",
        "kernel.cuh",
        "ptx::cp_async_wait<kInFlight>(); ptx::sync_block();",
        "ptx::sync_block();",
        SHARED_LOADS,
    ),
    Mutation(
        "two slots of shared loads: the next tile not waited for",
        "kernel.cuh",
        "T::kOwnLoads || T::kSlots > 2 ? 1 : 0;",
        "1;",
        TWO_BLOCKS,
    ),
    Mutation(
        "wait for the page indices one group short",
        "kernel.cuh",
        "ptx::cp_async_wait<kInFlight>(); ptx::sync_block();",
        "ptx::cp_async_wait<kInFlight + 1>(); ptx::sync_block();",
        E4M3,
    ),
    Mutation(
        "barrier before a tile is overwritten dropped",
        "kernel.cuh",
        "ptx::cp_async_wait<kInFlight>(); ptx::sync_block();",
        "ptx::cp_async_wait<kInFlight>();",
        E4M3,
    ),
    Mutation(
        "warp barrier after the wait dropped",
        "kernel.cuh",
        "* kGroups>(); ptx::sync_warp(); }",
        "* kGroups>(); }",
        E4M3,
    ),
    Mutation(
        "warp barrier before locations are read dropped",
        "load.cuh",
        "ptx::sync_warp(); copy_rows(tile.left(), slot);",
        "copy_rows(tile.left(), slot);",
        E4M3,
    ),
    Mutation(
        "warp barrier before locations are written again dropped",
        "load.cuh",
        "copy_rows(first_[i].left(), i); ptx::sync_warp();",
        "copy_rows(first_[i].left(), i);",
        E4M3,
    ),
    Mutation(
        "barrier between P and its readers dropped",
        "kernel.cuh",
        "if (ptx::sync_block_or(exceeds))",
        "if (exceeds)",
        TWO_BLOCKS,
    ),
    Mutation(
        "barrier between P and its readers only within warps",
        "kernel.cuh",
        "if (ptx::sync_block_or(exceeds))",
        "if (ptx::any(exceeds))",
        E4M3,
    ),
    Mutation(
        "barrier before Q's row maximum is read dropped",
        "attend.cuh",
        "ptx::sync_block(); float x[T::kWarpsPerRowTile];",
        "float x[T::kWarpsPerRowTile];",
        E4M3,
    ),
    Mutation(
        "barrier after rewriting P dropped",
        "attend.cuh",
        "softmax(slot, own); if constexpr (T::kWgmma) ptx::publish_to_wgmma(); ptx::sync_block();",
        "softmax(slot, own);",
        E4M3,
    ),
    Mutation(
        "barrier at the end of an item dropped",
        "attend.cuh",
        "ptx::sync_block(); } private:",
        "} private:",
        TWO_BLOCKS,
    ),
    Mutation(
        "locations where another warp's P is",
        "load.cuh",
        "warp_ * T::kLocationStride",
        "(warp_ ^ 1) * T::kLocationStride",
        E4M3,
    ),
    Mutation(
        "refill of the tile before",
        "kernel.cuh",
        "loader.refill(slot);",
        "loader.refill(slot == 0 ? T::kSlots - 1 : slot - 1);",
        E4M3,
    ),
    Mutation(
        "merge does not wait for the kernel before it",
        "merge.cuh",
        "ptx::wait_for_previous_kernel();",
        "",
        E4M3,
    ),
    Mutation(
        "queries fetched before the kernel before has ended",
        "kernel.cuh",
        "ptx::wait_for_previous_kernel();",
        "",
        E4M3,
    ),
    # ---- partials and merge
    Mutation(
        "partial output into the neighbour's slot",
        "attend.cuh",
        "(int64_t{item.partial} * T::kRows + row) * kCkvDim + warp_",
        "(int64_t{item.partial ^ 1} * T::kRows + row) * kCkvDim + warp_",
        SPLIT,
    ),
    Mutation(
        "merge begins one slot late",
        "merge.cuh",
        "int64_t{item_.slot_begin} * Rows + row; float top",
        "int64_t{item_.slot_begin + 1} * Rows + row; float top",
        SPLIT,
    ),
    Mutation(
        "merge: rows of few partials counted from the first item",
        "merge.cuh",
        "items_ += num_many;",
        "",
        ["test_split_kv[Rows8, 40 partials]"],
    ),
    Mutation(
        "merge: partials not weighted by their sums",
        "merge.cuh",
        "return sum * ptx::exp2(reference - top);",
        "return ptx::exp2(reference - top);",
        SPLIT,
    ),
    Mutation(
        "merge: references ignored",
        "merge.cuh",
        "return sum * ptx::exp2(reference - top);",
        "return sum;",
        ["test_moving_maximum[Rows8-rising-6-2]"],
    ),
    Mutation(
        "merge: what came before not rescaled",
        "merge.cuh",
        "if (begin > 0)",
        "if (begin < 0)",
        ["test_moving_maximum[Rows8-rising-20-20]"],
    ),
    Mutation(
        "merge: last warp's share lost",
        "merge.cuh",
        "ptx::ld_shared(v, shared + w * kWarpBytes + 8 * ptx::thread_index());",
        "ptx::ld_shared(v, shared + w % 3 * kWarpBytes + 8 * ptx::thread_index());",
        ["test_split_kv[Rows8, 40 partials]"],
    ),
    Mutation(
        "merge: barrier before reading the other warps' shares dropped",
        "merge.cuh",
        "ptx::sync_block(); if (ptx::thread_index() < kBlockDims / 2)",
        "if (ptx::thread_index() < kBlockDims / 2)",
        ["test_split_kv[Rows8, 40 partials]"],
    ),
    # ---- wgmma
    Mutation(
        "staggered: P not published to the tensor core",
        "staggered_kernel.cuh",
        "ptx::publish_to_wgmma();",
        "",
        WGMMA,
    ),
    Mutation(
        "wgmma: Q not published to the tensor core",
        "attend.cuh",
        "if constexpr (T::kWgmma) ptx::publish_to_wgmma(); ptx::sync_block(); zero(sum_);",
        "ptx::sync_block(); zero(sum_);",
        WGMMA,
    ),
    Mutation(
        "wgmma: P of one row tile in the place of another",
        "attend.cuh",
        "const uint32_t core = n * kCoreBytes + 4 * lane_;",
        "const uint32_t core = (n ^ 1) * kCoreBytes + 4 * lane_;",
        WGMMA,
    ),
    Mutation(
        "wgmma: the k-steps of K in the making overwrite those in use",
        "attend.cuh",
        "if (i + 1 < kGroups) widen(k[(i + 1) & 1]);",
        "if (i + 1 < kGroups) widen(k[i & 1]);",
        WGMMA,
    ),
    Mutation(
        "wgmma: widened before the group that used the registers is done",
        "attend.cuh",
        "ptx::wgmma_wait<1>(); if (i + 1 < kPvGroups)",
        "if (i + 1 < kPvGroups)",
        WGMMA,
    ),
    Mutation(
        "wgmma: scores read before the last group is done",
        "attend.cuh",
        "ptx::wgmma_wait<0>(); ptx::wgmma_result(score_[0]); }",
        "}",
        WGMMA,
    ),
    Mutation(
        "wgmma: P of the lower tokens not in the place of kpe",
        "attend.cuh",
        "half == 0 ? tile_address(slot) + T::kTokens * kCkvDim",
        "half == 0 ? shared_ + T::kPOffset",
        WGMMA,
    ),
    Mutation(
        "wgmma: sums of the wrong rows",
        "attend.cuh",
        "(up ? upper : lower) + ptx::shuffle_xor(up ? lower : upper, mask)",
        "(up ? lower : upper) + ptx::shuffle_xor(up ? upper : lower, mask)",
        WGMMA,
    ),
    Mutation(
        "wgmma: the upper dims in the place of the lower",
        "attend.cuh",
        "first = i % kPvParts * 4;",
        "first = 0;",
        WGMMA_32,
    ),
    Mutation(
        "wgmma: P of the plain loop not published to the tensor core",
        "kernel.cuh",
        "if constexpr (T::kWgmma) ptx::publish_to_wgmma();",
        "",
        WGMMA_32,
    ),
    Mutation(
        "wgmma: P not transposed",
        "attend.cuh",
        "ptx::wgmma<true>",
        "ptx::wgmma<false>",
        WGMMA,
    ),
    Mutation(
        "staggered: own rows not waited for",
        "staggered_kernel.cuh",
        "ptx::cp_async_wait<0>();",
        "",
        STAGGERED,
    ),
    Mutation(
        "staggered: page indices not waited for at an item's end",
        "staggered_kernel.cuh",
        "ptx::cp_async_wait<1>();",
        "",
        STAGGERED,
    ),
    Mutation(
        "staggered: refilled before the other warpgroup is done",
        "staggered_kernel.cuh",
        "ptx::sync_at<256>(A::kDoneBarrier + own); loader.refill(slot ^ 1); }",
        "loader.refill(slot ^ 1); }",
        STAGGERED,
    ),
    Mutation(
        "staggered: the other half's P not waited for",
        "staggered_kernel.cuh",
        "if (own == 0) { ptx::sync_at<256>(A::kReadyBarrier + other);",
        "if (own == 0) {",
        WGMMA,
    ),
    Mutation(
        "staggered: done before the other half's output",
        "staggered_kernel.cuh",
        "attend.output_wgmma(own == 1 ? slot : slot ^ 1, other); "
        "ptx::arrive_at<256>(A::kDoneBarrier + other);",
        "ptx::arrive_at<256>(A::kDoneBarrier + other); "
        "attend.output_wgmma(own == 1 ? slot : slot ^ 1, other);",
        STAGGERED,
    ),
    Mutation(
        "staggered: a warpgroup's own P not waited for",
        "staggered_kernel.cuh",
        "exceeds = ptx::sync_at_or<128>(A::kOwnBarrier + own, exceeds);",
        "exceeds = ptx::any(exceeds);",
        WGMMA,
    ),
    Mutation(
        "staggered: the output not shrunk when the other half raises references",
        "staggered_kernel.cuh",
        "if (attend.raised_by(other)) attend.shrink(other); "
        "attend.output_wgmma(own == 1 ? slot : slot ^ 1, other);",
        "attend.output_wgmma(own == 1 ? slot : slot ^ 1, other);",
        STAGGERED,
    ),
    Mutation(
        "staggered: a half's sums added before the output is shrunk",
        "staggered_kernel.cuh",
        "if (exceeds) attend.shrink(own); attend.add_sums();",
        "attend.add_sums(); if (exceeds) attend.shrink(own);",
        STAGGERED,
    ),
    Mutation(
        "staggered: sums over locations in use",
        "staggered_kernel.cuh",
        "ptx::sync_block(); // sums take the place of locations",
        "",
        STAGGERED,
    ),
    Mutation(
        "staggered: new references before all have read the old ones",
        "attend.cuh",
        "ptx::sync_at<128>(kOwnBarrier + half); // all have read the maxima and the old references",
        "",
        WGMMA,
    ),
    Mutation(
        "staggered: references not written",
        "attend.cuh",
        "if (warp_ % 4 == 0 && g_ == 0) { #pragma unroll for (int n = 0; n < T::kRowTiles; ++n) "
        "#pragma unroll for (int c = 0; c < 2; ++c) "
        "ptx::st_shared(row_state(qk_row(n, c)) + 4, raised[n][c]); }",
        "",
        STAGGERED,
    ),
    Mutation(
        "wgmma: kpe without its scale",
        "attend.cuh",
        "ptx::wgmma_result(score_[0]); scale_all(score_, p_.pe_ratio);",
        "ptx::wgmma_result(score_[0]);",
        ["test_scales[unequal, e5m2, WgmmaRows64]"],
    ),
]


def pattern(text: str) -> re.Pattern[str]:
    """Matches `text` however a formatter breaks it into lines."""
    return re.compile(r"\s+".join(re.escape(word) for word in text.split()))


def mutate(mutation: Mutation, folder: Path) -> str:
    """Changes the copy of the kernel in `folder`. Returns why that is not possible, or nothing."""
    file = folder / mutation.file
    text = file.read_text()
    matches = list(pattern(mutation.search).finditer(text))
    if len(matches) != 1:
        return f"the text to change occurs {len(matches)} times in {mutation.file}"
    file.write_text(text[: matches[0].start()] + mutation.replace + text[matches[0].end() :])
    return ""


def run_tests(tests: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest on these tests of test_kernels.py, against the kernel in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"{HERE / 'test_kernels.py'}::{test}" for test in tests]
    environment = {
        **os.environ,
        "MLA_FP8KV_KERNEL_FOLDER": str(folder),
        "MLA_FP8KV_CACHE": str(folder.parent / "cache"),  # gone with the copy
        "OPENBLAS_NUM_THREADS": "1",  # several of these run at once
    }
    return subprocess.run(
        command, env=environment, cwd=HERE, capture_output=True, text=True, check=False
    )


def try_mutation(mutation: Mutation, kernel: Path) -> tuple[str, str]:
    """(verdict, detail); the verdict is killed, survived or error."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "kernel"
        shutil.copytree(kernel, folder)
        problem = mutate(mutation, folder)
        if problem:
            return "error", problem
        result = run_tests(mutation.tests, folder)
    if result.returncode == 0:
        return "survived", ", ".join(mutation.tests)
    if DOES_NOT_COMPILE in result.stdout:
        return "error", re.search(r"error: .*", result.stdout).group(0)
    found = re.search(r"^FAILED \S*?::(.*?)(?: - |$)", result.stdout, re.M)
    if result.returncode != TESTS_FAILED or not found:
        return "error", (result.stdout + result.stderr).strip()[-300:]
    return "killed", f"by {found.group(1)}"


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(w in m.name for w in words)]
    if not chosen:
        print(f"no mutation has {' or '.join(words)} in its name")
        return 2
    begin = time.monotonic()
    count = {"killed": 0, "survived": 0, "error": 0}
    with tempfile.TemporaryDirectory() as scratch:
        kernel = Path(scratch) / "kernel"  # one state of the sources, whoever edits them meanwhile
        shutil.copytree(KERNEL, kernel)
        sound = run_tests(sorted({test for m in chosen for test in m.tests}), kernel)
        if sound.returncode != 0:
            print("the tests fail without any fault:\n" + sound.stdout[-4000:])
            return 1 if sound.returncode == TESTS_FAILED else 2
        print("unchanged: the tests pass", flush=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            tried = pool.map(lambda m: try_mutation(m, kernel), chosen)
            for mutation, (verdict, detail) in zip(chosen, tried, strict=True):
                count[verdict] += 1
                print(f"{verdict:<9} {mutation.name} ({detail})", flush=True)
    print(
        f"{len(chosen)} mutations: {count['killed']} killed, {count['survived']} survived, "
        f"{count['error']} could not be tried; {time.monotonic() - begin:.0f} s"
    )
    return 2 if count["error"] else int(count["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
