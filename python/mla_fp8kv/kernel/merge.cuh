/*
 * The merge of partial results: rows whose KV was split over CTAs, and rows that see no KV at all.
 *
 * out = sum_i w_i out_i / sum_i w_i with w_i = sum_i 2^(reference_i - max reference), in FP32, always in the same order,
 * so the result does not change from run to run.
 */
#pragma once
#include "load.cuh"
#include "params.h"
#include "ptx.cuh"
#include "traits.cuh"

namespace mla_fp8kv {

constexpr int kMergeThreads = 128;
constexpr int kMergeCtasPerSm = 4;
constexpr int kMergeDims = 8;  // per lane

// Running merge of one lane's dims.
struct Merged {
  float reference = -__builtin_huge_valf();
  float sum = 0.f;
  float out[kMergeDims] = {};

  MLA_DEVICE void add(float other_reference, float other_sum, const float (&other)[kMergeDims]) {
    const float top = ptx::max(reference, other_reference);
    const float mine = reference == top ? 1.f : ptx::exp2(reference - top);
    const float theirs = other_reference == top ? 1.f : ptx::exp2(other_reference - top);
#pragma unroll
    for (int i = 0; i < kMergeDims; ++i) out[i] = out[i] * mine + other[i] * theirs;
    sum = sum * mine + other_sum * theirs;
    reference = top;
  }
};

template <bool Fp32>
struct PartialPiece {
  ptx::U4 v[Fp32 ? 2 : 1];
  MLA_DEVICE void load(const void* base, int64_t element) {
    if constexpr (Fp32) {
      const ptx::U4* src = reinterpret_cast<const ptx::U4*>(static_cast<const float*>(base) + element);
      v[0] = ptx::ld_fresh(src);
      v[1] = ptx::ld_fresh(src + 1);
    } else {
      v[0] = ptx::ld_fresh(
          reinterpret_cast<const ptx::U4*>(static_cast<const uint16_t*>(base) + element));
    }
  }
  MLA_DEVICE void unpack(float (&x)[kMergeDims]) const {
    if constexpr (Fp32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[4 * i] = ptx::as_float(v[i].x);
        x[4 * i + 1] = ptx::as_float(v[i].y);
        x[4 * i + 2] = ptx::as_float(v[i].z);
        x[4 * i + 3] = ptx::as_float(v[i].w);
      }
    } else {
      ptx::unpack_f16x2(v[0].x, x[0], x[1]);
      ptx::unpack_f16x2(v[0].y, x[2], x[3]);
      ptx::unpack_f16x2(v[0].z, x[4], x[5]);
      ptx::unpack_f16x2(v[0].w, x[6], x[7]);
    }
  }
};

// A block does slices of Lanes x 8 dims of one row; its other threads share the partials: kMergeThreads / Lanes at once,
// in Depth loads each before the first use.
template <int Rows, bool Fp32, int Lanes, int Depth>
MLA_DEVICE void merge_rows(const Params& p, const PlanHeader& header, uint32_t shared) {
  constexpr int kSlices = kCkvDim / (Lanes * kMergeDims);
  constexpr int kShares = kMergeThreads / Lanes;
  static_assert(Lanes <= 32, "a warp holds whole slices");
  const int lane = ptx::thread_index() % Lanes, share = ptx::thread_index() / Lanes;
  const int warp = ptx::thread_index() >> 5;
  const MergeItem* items = reinterpret_cast<const MergeItem*>(p.plan + header.merge_offset);
  const int64_t units = int64_t{header.num_merge_items} * Rows * kSlices;
  for (int64_t unit = ptx::block_index(); unit < units; unit += ptx::grid_size()) {
    const int slice = static_cast<int>(unit % kSlices);
    const int row = static_cast<int>(unit / kSlices % Rows);
    const MergeItem* item = items + unit / (kSlices * Rows);
    const ptx::U4 a = ptx::ld_const(reinterpret_cast<const ptx::U4*>(item));
    const int q_begin = a.x, row_begin = a.y, rows = a.z, slot_begin = a.w;
    const int count = ptx::ld_const(&item->count);
    if (row >= rows) continue;  // the same for the whole block

    const int dim = slice * Lanes * kMergeDims + lane * kMergeDims;
    const int64_t first = int64_t{slot_begin} * Rows + row;
    Merged merged;
    for (int i0 = share; i0 < count; i0 += kShares * Depth) {
      PartialPiece<Fp32> piece[Depth];
      ptx::U2 stat[Depth];
#pragma unroll
      for (int d = 0; d < Depth; ++d) {
        const int i = i0 + d * kShares;
        if (i >= count) break;
        const int64_t at = first + int64_t{i} * Rows;
        piece[d].load(p.partial_out, at * kCkvDim + dim);
        stat[d] = ptx::ld_fresh(reinterpret_cast<const ptx::U2*>(p.partial_stat + at * 2));
      }
#pragma unroll
      for (int d = 0; d < Depth; ++d) {
        if (i0 + d * kShares >= count) break;
        const float sum = ptx::as_float(stat[d].y);
        float x[kMergeDims];
        piece[d].unpack(x);
#pragma unroll
        for (int k = 0; k < kMergeDims; ++k) x[k] *= sum;
        merged.add(ptx::as_float(stat[d].x), sum, x);
      }
    }
    // Shares within the warp, then the warps.
#pragma unroll
    for (int mask = Lanes; mask < 32; mask *= 2) {
      float x[kMergeDims];
#pragma unroll
      for (int k = 0; k < kMergeDims; ++k) x[k] = ptx::shuffle_xor(merged.out[k], mask);
      const float reference = ptx::shuffle_xor(merged.reference, mask);
      const float sum = ptx::shuffle_xor(merged.sum, mask);
      merged.add(reference, sum, x);
    }
    const uint32_t cell = shared + (warp * Lanes + lane) * (kMergeDims + 2) * 4;
    if ((ptx::thread_index() & 31) < Lanes) {
#pragma unroll
      for (int k = 0; k < kMergeDims; ++k) ptx::st_shared(cell + 4 * k, merged.out[k]);
      ptx::st_shared(cell + 4 * kMergeDims, merged.reference);
      ptx::st_shared(cell + 4 * kMergeDims + 4, merged.sum);
    }
    ptx::sync_block();
    if (ptx::thread_index() < Lanes) {
#pragma unroll
      for (int w = 1; w < kMergeThreads / 32; ++w) {
        const uint32_t other = cell + w * Lanes * (kMergeDims + 2) * 4;
        float x[kMergeDims], reference, sum;
#pragma unroll
        for (int k = 0; k < kMergeDims; ++k) ptx::ld_shared(x[k], other + 4 * k);
        ptx::ld_shared(reference, other + 4 * kMergeDims);
        ptx::ld_shared(sum, other + 4 * kMergeDims + 4);
        merged.add(reference, sum, x);
      }
      const uint32_t packed = row_begin + row;
      const uint32_t query = divide(packed, p.heads);
      const int64_t token = q_begin + query;
      const int64_t head = packed - query * p.heads.value;
      const float scale = merged.sum == 0.f ? 0.f : ptx::divide(p.out_scale, merged.sum);
      uint32_t y[kMergeDims / 2];
#pragma unroll
      for (int k = 0; k < kMergeDims / 2; ++k) {
        const float lo = merged.out[2 * k] * scale, hi = merged.out[2 * k + 1] * scale;
        y[k] = p.q_is_bf16 ? ptx::pack_bf16x2(lo, hi) : ptx::pack_f16x2(lo, hi);
      }
      uint16_t* out = p.out + token * p.out_token_stride + head * p.out_head_stride + dim;
      ptx::st_global(reinterpret_cast<ptx::U4*>(out), ptx::U4{y[0], y[1], y[2], y[3]});
      if (p.lse != nullptr && slice == 0 && lane == 0) {
        const float lse = merged.sum == 0.f ? -__builtin_huge_valf()
                                            : merged.reference + ptx::log2(merged.sum);
        ptx::st_global(p.lse + (int64_t{q_begin} * p.heads.value + packed), lse * p.lse_scale);
      }
    }
    ptx::sync_block();
  }
}

template <int Rows, bool Fp32>
MLA_KERNEL(kMergeThreads, 8)
merge_kernel(const Params p) {
  const PlanHeader* plan = reinterpret_cast<const PlanHeader*>(p.plan);
  PlanHeader header;
  header.num_merge_items = ptx::ld_const(&plan->num_merge_items);
  header.merge_offset = ptx::ld_const(&plan->merge_offset);
  header.max_count = ptx::ld_const(&plan->max_count);
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const uint32_t shared = ptx::shared_base();
  // Many partials of few rows: narrow slices, so that enough blocks read them.
  if (header.max_count > 32) {
    merge_rows<Rows, Fp32, 4, Fp32 ? 2 : 4>(p, header, shared);
  } else {
    merge_rows<Rows, Fp32, 16, 2>(p, header, shared);
  }
}
constexpr int kMergeSharedBytes = kMergeThreads / 32 * 32 * (kMergeDims + 2) * 4;

}  // namespace mla_fp8kv
