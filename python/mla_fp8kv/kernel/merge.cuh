/*
 * The merge of partial results: rows whose KV was split over CTAs, and rows that see no KV at all.
 *
 * out = sum_i w_i out_i / sum_i w_i with w_i = sum_i 2^(reference_i - max reference), in FP32,
 * always in the same order, so the result does not change from run to run.
 */
#pragma once
#include "load.cuh"
#include "params.h"
#include "ptx.cuh"
#include "traits.cuh"

namespace mla_fp8kv {

constexpr int kMergeThreads = 128;
// Enough blocks for all rows of a full grid at once, few where rows are few: empty blocks cost too.
constexpr int merge_ctas_per_sm(int rows) { return rows <= 8 ? 2 : rows <= 16 ? 4 : 8; }
constexpr int kMergeDims = 8;  // per lane
struct Merged {
  float reference = -__builtin_huge_valf();
  float sum = 0.f;
  float out[kMergeDims] = {};

  // Makes `top` the reference.
  MLA_DEVICE void raise(float top) {
    const float shrink = reference == top ? 1.f : ptx::exp2(reference - top);
#pragma unroll
    for (int i = 0; i < kMergeDims; ++i) out[i] *= shrink;
    sum *= shrink;
    reference = top;
  }
  // Adds what was summed against `other_reference`, which is at most the own one.
  MLA_DEVICE void add(float other_reference, float other_sum, const float (&other)[kMergeDims]) {
    const float weight =
        other_reference == reference ? 1.f : ptx::exp2(other_reference - reference);
#pragma unroll
    for (int i = 0; i < kMergeDims; ++i) out[i] = ptx::fma(other[i], weight, out[i]);
    sum = ptx::fma(other_sum, weight, sum);
  }
};

template <bool Fp32>
struct PartialPiece {
  ptx::U4 v[Fp32 ? 2 : 1];
  MLA_DEVICE void load(const void* base, int64_t element) {
    if constexpr (Fp32) {
      const ptx::U4* src =
          reinterpret_cast<const ptx::U4*>(static_cast<const float*>(base) + element);
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

// Merges partials first, first + Step, ... below `count`, `Depth` loads at once.
template <int Rows, bool Fp32, int Step, int Depth>
MLA_DEVICE void merge_partials(const Params& p, int64_t slot_row, int dim, int first, int count,
                               Merged& merged) {
  for (int i0 = first; i0 < count; i0 += Step * Depth) {
    PartialPiece<Fp32> piece[Depth];
    ptx::U2 stat[Depth];
#pragma unroll
    for (int d = 0; d < Depth; ++d) {
      stat[d] = {ptx::as_bits(merged.reference), 0};
      piece[d] = {};
      if (i0 + d * Step < count) {
        const int64_t at = slot_row + int64_t{i0 + d * Step} * Rows;
        stat[d] = ptx::ld_fresh(reinterpret_cast<const ptx::U2*>(p.partial_stat + at * 2));
        piece[d].load(p.partial_out, at * kCkvDim + dim);
      }
    }
    float top = merged.reference;
#pragma unroll
    for (int d = 0; d < Depth; ++d) top = ptx::max(top, ptx::as_float(stat[d].x));
    merged.raise(top);
#pragma unroll
    for (int d = 0; d < Depth; ++d) {
      const float sum = ptx::as_float(stat[d].y);
      float x[kMergeDims];
      piece[d].unpack(x);
#pragma unroll
      for (int k = 0; k < kMergeDims; ++k) x[k] *= sum;  // partials are divided by their sum
      merged.add(ptx::as_float(stat[d].x), sum, x);
    }
  }
}

MLA_DEVICE MergeItem load_merge_item(const MergeItem* item) {
  const ptx::U4 a = ptx::ld_const(reinterpret_cast<const ptx::U4*>(item));
  MergeItem v = {};
  v.q_begin = static_cast<int32_t>(a.x);
  v.row_begin = static_cast<int32_t>(a.y);
  v.rows = static_cast<int32_t>(a.z);
  v.slot_begin = static_cast<int32_t>(a.w);
  v.count = ptx::ld_const(&item->count);
  return v;
}

MLA_DEVICE void write_merged(const Params& p, const MergeItem& item, int row, int dim,
                             const Merged& merged) {
  const uint32_t packed = item.row_begin + row;
  const uint32_t query = divide(packed, p.heads);
  const int64_t token = item.q_begin + query;
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
  if (p.lse != nullptr && dim == 0) {
    const float lse =
        merged.sum == 0.f ? -__builtin_huge_valf() : merged.reference + ptx::log2(merged.sum);
    ptx::st_global(p.lse + (int64_t{item.q_begin} * p.heads.value + packed), lse * p.lse_scale);
  }
}

// Few partials: a lane merges all partials of its dims, 64 lanes a row, nothing is exchanged.
template <int Rows, bool Fp32>
class MergeFew {
 public:
  // Asks for the first item. Only the plan is read: the partials may still be in the making.
  MLA_DEVICE MergeFew(const Params& p, const PlanHeader& header)
      : p_(p),
        items_(reinterpret_cast<const MergeItem*>(p.plan + header.merge_offset) + header.num_many),
        rows_(int64_t{header.num_merge_items - header.num_many} * Rows) {
    // From the last block on: the first ones may have many partials to merge.
    const int block = ptx::grid_size() - 1 - ptx::block_index();
    first_ = int64_t{block} * kRowsAtOnce + ptx::thread_index() / kLanes;
    if (first_ < rows_) item_ = load_merge_item(items_ + first_ / Rows);
  }

  MLA_DEVICE void run() {
    const int dim = ptx::thread_index() % kLanes * kMergeDims;
    for (int64_t at = first_; at < rows_; at += ptx::grid_size() * kRowsAtOnce) {
      if (at != first_) item_ = load_merge_item(items_ + at / Rows);
      const int row = static_cast<int>(at % Rows);
      if (row >= item_.rows) continue;
      Merged merged;
      merge_partials<Rows, Fp32, 1, Fp32 ? 4 : 8>(p_, int64_t{item_.slot_begin} * Rows + row, dim,
                                                  0, item_.count, merged);
      write_merged(p_, item_, row, dim, merged);
    }
  }

 private:
  static constexpr int kLanes = kCkvDim / kMergeDims;
  static constexpr int kRowsAtOnce = kMergeThreads / kLanes;

  const Params& p_;
  const MergeItem* items_;
  int64_t rows_, first_;
  MergeItem item_ = {};
};

// Many partials of few rows: a block does 32 dims of one row, 4 lanes for each of 32 shares of the
// partials.
template <int Rows, bool Fp32>
MLA_DEVICE void merge_many(const Params& p, const PlanHeader& header, uint32_t shared) {
  constexpr int kLanes = 4, kShares = kMergeThreads / kLanes;
  constexpr int kSlices = kCkvDim / (kLanes * kMergeDims);
  const int lane = ptx::thread_index() % kLanes, share = ptx::thread_index() / kLanes;
  const MergeItem* items = reinterpret_cast<const MergeItem*>(p.plan + header.merge_offset);
  const int64_t units = int64_t{header.num_many} * Rows * kSlices;
  for (int64_t unit = ptx::block_index(); unit < units; unit += ptx::grid_size()) {
    const MergeItem item = load_merge_item(items + unit / (kSlices * Rows));
    const int row = static_cast<int>(unit / kSlices % Rows);
    if (row >= item.rows) continue;  // the same for the whole block
    const int dim = (static_cast<int>(unit % kSlices) * kLanes + lane) * kMergeDims;
    Merged merged;
    merge_partials<Rows, Fp32, kShares, Fp32 ? 4 : 8>(p, int64_t{item.slot_begin} * Rows + row, dim,
                                                      share, item.count, merged);
    // Shares within the warp, then the warps.
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) {
      float x[kMergeDims];
#pragma unroll
      for (int k = 0; k < kMergeDims; ++k) x[k] = ptx::shuffle_xor(merged.out[k], mask);
      const float reference = ptx::shuffle_xor(merged.reference, mask);
      const float sum = ptx::shuffle_xor(merged.sum, mask);
      merged.raise(ptx::max(merged.reference, reference));
      merged.add(reference, sum, x);
    }
    const int warp = ptx::thread_index() >> 5;
    const uint32_t cell = shared + (warp * kLanes + lane) * (kMergeDims + 2) * 4;
    if ((ptx::thread_index() & 31) < kLanes) {
#pragma unroll
      for (int k = 0; k < kMergeDims; ++k) ptx::st_shared(cell + 4 * k, merged.out[k]);
      ptx::st_shared(cell + 4 * kMergeDims, merged.reference);
      ptx::st_shared(cell + 4 * kMergeDims + 4, merged.sum);
    }
    ptx::sync_block();
    if (ptx::thread_index() < kLanes) {
#pragma unroll
      for (int w = 1; w < kMergeThreads / 32; ++w) {
        const uint32_t other = cell + w * kLanes * (kMergeDims + 2) * 4;
        float x[kMergeDims], reference, sum;
#pragma unroll
        for (int k = 0; k < kMergeDims; ++k) ptx::ld_shared(x[k], other + 4 * k);
        ptx::ld_shared(reference, other + 4 * kMergeDims);
        ptx::ld_shared(sum, other + 4 * kMergeDims + 4);
        merged.raise(ptx::max(merged.reference, reference));
        merged.add(reference, sum, x);
      }
      write_merged(p, item, row, dim, merged);
    }
    ptx::sync_block();
  }
}

template <int Rows, bool Fp32>
MLA_KERNEL(kMergeThreads, 4)
merge_kernel(const Params p) {
  ptx::let_next_kernel_start();
  const PlanHeader* plan = reinterpret_cast<const PlanHeader*>(p.plan);
  PlanHeader header;
  header.num_merge_items = ptx::ld_const(&plan->num_merge_items);
  header.merge_offset = ptx::ld_const(&plan->merge_offset);
  header.num_many = ptx::ld_const(&plan->num_many);
  MergeFew<Rows, Fp32> few(p, header);
  ptx::wait_for_previous_kernel();
  merge_many<Rows, Fp32>(p, header, ptx::shared_base());
  few.run();
}
constexpr int kMergeSharedBytes = kMergeThreads / 32 * 4 * (kMergeDims + 2) * 4;

}  // namespace mla_fp8kv
