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

// Dims of one partial row as a lane loads them: FP16, or FP32 where there are group scales.
template <int Dims, bool Fp32>
struct PartialPiece {
  uint32_t v[Fp32 ? Dims : Dims / 2];
  MLA_DEVICE void load(const void* base, int64_t element) {
    const auto* src = static_cast<const uint8_t*>(base) + element * (Fp32 ? 4 : 2);
    if constexpr (sizeof v == 8) {
      const ptx::U2 x = ptx::ld_fresh(reinterpret_cast<const ptx::U2*>(src));
      v[0] = x.x;
      v[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof v / 16); ++i) {
        const ptx::U4 x = ptx::ld_fresh(reinterpret_cast<const ptx::U4*>(src) + i);
        v[4 * i] = x.x;
        v[4 * i + 1] = x.y;
        v[4 * i + 2] = x.z;
        v[4 * i + 3] = x.w;
      }
    }
  }
  // sum += weight x the piece.
  MLA_DEVICE void add_to(float (&sum)[Dims], float weight) const {
#pragma unroll
    for (int i = 0; i < Dims; i += 2) {
      float lo, hi;
      if constexpr (Fp32) {
        lo = ptx::as_float(v[i]);
        hi = ptx::as_float(v[i + 1]);
      } else {
        ptx::unpack_f16x2(v[i / 2], lo, hi);
      }
      sum[i] = ptx::fma(lo, weight, sum[i]);
      sum[i + 1] = ptx::fma(hi, weight, sum[i + 1]);
    }
  }
};

// What a row has beside its output; {kNoReference, 0} where there is no partial.
struct PartialStat {
  float reference = kNoReference, sum = 0.f;
  MLA_DEVICE void load(const float* base, int64_t row) {
    const ptx::U2 v = ptx::ld_fresh(reinterpret_cast<const ptx::U2*>(base + row * 2));
    reference = ptx::as_float(v.x);
    sum = ptx::as_float(v.y);
  }
  // Partial outputs are divided by their sums.
  MLA_DEVICE float weight(float top) const { return sum * ptx::exp2(reference - top); }
};

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

// Where row `row` of the item goes.
MLA_DEVICE uint16_t* merged_out(const Params& p, const MergeItem& item, int row) {
  return p.out +
         row_offset(p, item.q_begin, item.row_begin + row, p.out_token_stride, p.out_head_stride);
}
MLA_DEVICE float merged_scale(const Params& p, float sum) {
  return sum == 0.f ? 0.f : ptx::divide(p.out_scale, sum);
}
MLA_DEVICE uint32_t merged_pair(const Params& p, float lo, float hi) {
  return p.q_is_bf16 ? ptx::pack_bf16x2(lo, hi) : ptx::pack_f16x2(lo, hi);
}
MLA_DEVICE void write_merged_lse(const Params& p, const MergeItem& item, int row, float top,
                                 float sum) {
  if (p.lse == nullptr) return;
  const float lse = sum == 0.f ? -__builtin_huge_valf() : top + ptx::log2(sum);
  ptx::st_global(p.lse + (int64_t{item.q_begin} * p.heads.value + item.row_begin + row),
                 lse * p.lse_scale);
}

// Few partials, or many rows: a warp merges all partials of some dims of a row, a lane those of its
// dims, kAtOnce partials at once. Lane i finds the weight of partial i % kAtOnce.
template <int Rows, bool Fp32>
class MergeFew {
 public:
  // Asks for the first item, and for the TLB to know where its partials are: these may still be in
  // the making, only the plan is read.
  MLA_DEVICE MergeFew(const Params& p, const MergeItem* items, uint32_t shared)
      : p_(p), items_(items), warp_(ptx::thread_index() >> 5) {
    weights_ = shared + warp_ * kAtOnce * 4;
    first_ = int64_t{ptx::block_index()} * kWarps + warp_;
    item_ = load_merge_item(items_ + first_ / (Rows * kSlices));
    if constexpr (MLA_FP8KV_HAS_DEPENDENT_LAUNCH) {
      const int row = static_cast<int>(first_ / kSlices % Rows);
      if (row < item_.rows) prefetch(row, static_cast<int>(first_ % kSlices));
    }
  }

  // Does the items from num_many on. Where there are others, those come in the first blocks.
  MLA_DEVICE void run(int num_items, int num_many) {
    const int64_t units = int64_t{num_items - num_many} * Rows * kSlices;
    if (num_many > 0) {
      items_ += num_many;
      first_ = int64_t{ptx::grid_size() - 1 - ptx::block_index()} * kWarps + warp_;
    }
    for (int64_t unit = first_; unit < units; unit += ptx::grid_size() * kWarps) {
      if (unit != first_ || num_many > 0) item_ = load_merge_item(items_ + unit / (Rows * kSlices));
      const int row = static_cast<int>(unit / kSlices % Rows);
      if (row < item_.rows) merge_row(row, static_cast<int>(unit % kSlices));
    }
  }

 private:
  static constexpr int kWarps = kMergeThreads / 32;
  static constexpr int kDims = Rows <= 16 || Fp32 ? 4 : 8;  // more warps where there are few rows
  static constexpr int kAtOnce = kDims == 4 ? kFewPartials : kFewPartials / 2;
  static constexpr int kSlices = kCkvDim / (32 * kDims);
  static_assert(merge_ctas_per_sm(Rows) * kWarps * 2 <= Rows * kSlices,
                "the first item of a block is among the least_merge_items of one CTA an SM");

  MLA_DEVICE int first_dim(int slice) const {
    return (slice * 32 + (ptx::thread_index() & 31)) * kDims;
  }

  MLA_DEVICE void prefetch(int row, int slice) const {
    const int64_t slot_row = int64_t{item_.slot_begin} * Rows + row;
    ptx::prefetch(p_.partial_stat + slot_row * 2);
    ptx::prefetch(static_cast<const uint8_t*>(p_.partial_out) +
                  (slot_row * kCkvDim + first_dim(slice)) * (Fp32 ? 4 : 2));
    ptx::prefetch(merged_out(p_, item_, row) + first_dim(slice));
  }

  MLA_DEVICE void merge_row(int row, int slice) const {
    const int lane = ptx::thread_index() & 31;
    const int dim = first_dim(slice);
    const int64_t slot_row = int64_t{item_.slot_begin} * Rows + row;
    float top = kNoReference, sum = 0.f, out[kDims] = {};
    for (int begin = 0; begin < item_.count; begin += kAtOnce) {
      const int count = item_.count - begin;
      const int64_t first = slot_row + int64_t{begin} * Rows;
      PartialStat stat;
      const int own = lane % kAtOnce;
      if (own < count) stat.load(p_.partial_stat, first + own * Rows);
      PartialPiece<kDims, Fp32> piece[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < count) piece[i].load(p_.partial_out, (first + i * Rows) * kCkvDim + dim);
      }

      float raised = ptx::max(top, stat.reference);
#pragma unroll
      for (int i = 1; i < kAtOnce; i *= 2) raised = ptx::max(raised, ptx::shuffle_xor(raised, i));
      const float weight = stat.weight(raised);
      float added = weight;
#pragma unroll
      for (int i = 1; i < kAtOnce; i *= 2) added += ptx::shuffle_xor(added, i);
      ptx::sync_warp();  // the weights before these are read
      if (lane < kAtOnce) ptx::st_shared(weights_ + 4 * lane, weight);
      ptx::sync_warp();

      if (begin > 0) {
        const float shrink = ptx::exp2(top - raised);
        sum *= shrink;
#pragma unroll
        for (int k = 0; k < kDims; ++k) out[k] *= shrink;
      }
      top = raised;
      sum += added;
#pragma unroll
      for (int i = 0; i < kAtOnce; i += 4) {
        if (i >= count) break;
        ptx::U4 w;
        ptx::ld_shared(w, weights_ + 4 * i);
        piece[i].add_to(out, ptx::as_float(w.x));
        piece[i + 1].add_to(out, ptx::as_float(w.y));
        piece[i + 2].add_to(out, ptx::as_float(w.z));
        piece[i + 3].add_to(out, ptx::as_float(w.w));
      }
    }
    const float scale = merged_scale(p_, sum);
    uint16_t* to = merged_out(p_, item_, row) + dim;
#pragma unroll
    for (int k = 0; k < kDims; k += 4) {
      ptx::st_global(reinterpret_cast<ptx::U2*>(to + k),
                     ptx::U2{merged_pair(p_, out[k] * scale, out[k + 1] * scale),
                             merged_pair(p_, out[k + 2] * scale, out[k + 3] * scale)});
    }
    if (dim == 0) write_merged_lse(p_, item_, row, top, sum);
  }

  const Params& p_;
  const MergeItem* items_;
  int warp_;
  uint32_t weights_;  // float [kAtOnce] of this warp
  int64_t first_;     // a unit is a row and a slice of its dims
  MergeItem item_;
};

// Many partials of few rows: a block does 32 dims of one row, 4 lanes for each of 32 shares of the
// partials. `first` is the block's first item, if it has one.
constexpr int kManySlices = 16;  // of a row
template <int Rows, bool Fp32>
MLA_DEVICE void merge_many(const Params& p, const MergeItem* items, const MergeItem& first,
                           int num_many, uint32_t shared) {
  constexpr int kDims = 8, kLanes = 4, kShares = kMergeThreads / kLanes;
  constexpr int kBlockDims = kLanes * kDims, kSlices = kManySlices;
  static_assert(kBlockDims * kSlices == kCkvDim, "the slices make a row");
  constexpr int kDepth = Fp32 ? 5 : 10;  // partials a lane has in flight: all of a full grid
  constexpr uint32_t kWarpBytes = (kBlockDims + 2) * 4;
  const int lane = ptx::thread_index() & 31, warp = ptx::thread_index() >> 5;
  const int share = ptx::thread_index() / kLanes;
  const int64_t units = int64_t{num_many} * Rows * kSlices;
  for (int64_t unit = ptx::block_index(); unit < units; unit += ptx::grid_size()) {
    MergeItem item = first;
    if (unit != ptx::block_index()) item = load_merge_item(items + unit / (kSlices * Rows));
    const int row = static_cast<int>(unit / kSlices % Rows);
    if (row >= item.rows) continue;  // the same for the whole block
    const int slice = static_cast<int>(unit % kSlices) * kBlockDims;
    const int64_t slot_row = int64_t{item.slot_begin} * Rows + row;

    // The warp's shares, against one reference.
    float top = kNoReference, sum = 0.f, out[kDims] = {};
    for (int begin = 0; begin < item.count; begin += kShares * kDepth) {
      PartialStat stat[kDepth];
      PartialPiece<kDims, Fp32> piece[kDepth] = {};
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int i = begin + d * kShares + share;
        if (i < item.count) {
          const int64_t at = slot_row + int64_t{i} * Rows;
          stat[d].load(p.partial_stat, at);
          piece[d].load(p.partial_out, at * kCkvDim + slice + lane % kLanes * kDims);
        }
      }
      float raised = top;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) raised = ptx::max(raised, stat[d].reference);
#pragma unroll
      for (int i = kLanes; i < 32; i *= 2) raised = ptx::max(raised, ptx::shuffle_xor(raised, i));
      const float shrink = ptx::exp2(top - raised);
      top = raised;
      sum *= shrink;
#pragma unroll
      for (int k = 0; k < kDims; ++k) out[k] *= shrink;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const float weight = stat[d].weight(top);
        sum += weight;
        piece[d].add_to(out, weight);
      }
    }

    // The sum over its shares; each lane ends up with one dim.
#pragma unroll
    for (int i = kLanes; i < 32; i *= 2) sum += ptx::shuffle_xor(sum, i);
#pragma unroll
    for (int half = kDims / 2, i = 16; half > 0; half /= 2, i /= 2) {
      const bool upper = (lane & i) != 0;
#pragma unroll
      for (int k = 0; k < half; ++k) {
        const float given = ptx::shuffle_xor(upper ? out[k] : out[k + half], i);
        out[k] = (upper ? out[k + half] : out[k]) + given;
      }
    }
    const int own =
        lane % kLanes * kDims + (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    const uint32_t cells = shared + warp * kWarpBytes;
    ptx::st_shared(cells + 4 * own, out[0]);
    if (lane == 0) {
      ptx::st_shared(cells + 4 * kBlockDims, ptx::U2{ptx::as_bits(top), ptx::as_bits(sum)});
    }
    ptx::sync_block();

    if (ptx::thread_index() < kBlockDims / 2) {  // two dims a thread, of all warps
      PartialStat stat[kMergeThreads / 32];
      float highest = kNoReference, total = 0.f, lo = 0.f, hi = 0.f;
#pragma unroll
      for (int w = 0; w < kMergeThreads / 32; ++w) {
        ptx::U2 v;
        ptx::ld_shared(v, shared + w * kWarpBytes + 4 * kBlockDims);
        stat[w].reference = ptx::as_float(v.x);
        stat[w].sum = ptx::as_float(v.y);
        highest = ptx::max(highest, stat[w].reference);
      }
#pragma unroll
      for (int w = 0; w < kMergeThreads / 32; ++w) {
        const float weight = ptx::exp2(stat[w].reference - highest);
        ptx::U2 v;
        ptx::ld_shared(v, shared + w * kWarpBytes + 8 * ptx::thread_index());
        total = ptx::fma(stat[w].sum, weight, total);
        lo = ptx::fma(ptx::as_float(v.x), weight, lo);
        hi = ptx::fma(ptx::as_float(v.y), weight, hi);
      }
      const float scale = merged_scale(p, total);
      const int dim = slice + 2 * ptx::thread_index();
      ptx::st_global(reinterpret_cast<uint32_t*>(merged_out(p, item, row) + dim),
                     merged_pair(p, lo * scale, hi * scale));
      if (dim == 0) write_merged_lse(p, item, row, highest, total);
    }
    ptx::sync_block();
  }
}

template <int Rows, bool Fp32>
MLA_KERNEL(kMergeThreads, 4)
merge_kernel(const Params p) {
  ptx::let_next_kernel_start();
  const MergeItem* items = reinterpret_cast<const MergeItem*>(p.plan + p.merge_offset);
  const auto* header = reinterpret_cast<const PlanHeader*>(p.plan);
  const int num_items = ptx::ld_const(&header->num_merge_items);
  const int num_many = ptx::ld_const(&header->num_many);
  const uint32_t shared = ptx::shared_base();
  const MergeItem first_many = load_merge_item(items + ptx::block_index() / (Rows * kManySlices));
  MergeFew<Rows, Fp32> few(p, items, shared);
  ptx::wait_for_previous_kernel();
  merge_many<Rows, Fp32>(p, items, first_many, num_many, shared);
  few.run(num_items, num_many);
}

// Of each warp: with many partials, a sum of 32 dims and its statistics, with few, their weights.
constexpr int kMergeSharedBytes = kMergeThreads / 32 * (32 + 2) * 4;
static_assert(kMergeSharedBytes >= kMergeThreads / 32 * kFewPartials * 4, "one place for both");

}  // namespace mla_fp8kv
