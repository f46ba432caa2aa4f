/*
 * The attention kernel: the order of things and nothing else.
 *
 * One persistent CTA walks the work items the plan gave it. Loads run ahead of the arithmetic
 * across items.
 */
#pragma once
#include "attend.cuh"
#include "load.cuh"
#include "params.h"
#include "ptx.cuh"
#include "traits.cuh"

namespace mla_fp8kv {

MLA_DEVICE WorkItem load_item(const WorkItem* item) {
  const ptx::U4 a = ptx::ld_const(reinterpret_cast<const ptx::U4*>(item));
  const ptx::U4 b = ptx::ld_const(reinterpret_cast<const ptx::U4*>(item) + 1);
  return {static_cast<int32_t>(a.x), static_cast<int32_t>(a.y), static_cast<int32_t>(a.z),
          static_cast<int32_t>(a.w), static_cast<int32_t>(b.x), static_cast<int32_t>(b.y),
          static_cast<int32_t>(b.z), static_cast<int32_t>(b.w)};
}

// The plan's tile may have more rows than T: then the CTAs of one x and all y share its items,
// T::kRows rows each, and a partial slot of the plan is grid_size_y slots of T.
template <class T>
MLA_DEVICE void take_part(WorkItem& item) {
  const int part = ptx::block_index_y();
  item.row_begin += part * T::kRows;
  item.rows -= part * T::kRows;
  item.rows = item.rows < 0 ? 0 : item.rows < T::kRows ? item.rows : T::kRows;
  if (item.partial >= 0) item.partial = item.partial * ptx::grid_size_y() + part;
}

// What the plan gave this CTA: its first item, and further ones [more, more_end) of the plan.
struct Work {
  WorkItem item;
  int more, more_end;
};

// Brings what is read first into L2, and its pages into the TLB, while the previous kernel may
// still run. It is read after that kernel's end: what that writes is seen.
template <class T>
MLA_DEVICE void prefetch(const Params& p, const WorkItem& item) {
  const int thread = ptx::thread_index();
  if (item.kv_begin + thread < item.kv_end) {
    ptx::prefetch(p.kv_indices + item.page_begin + divide(item.kv_begin + thread, p.page_size));
  }
  constexpr int kPieces = T::kThreads / T::kRows;  // of a row of Q: 128 bytes each
  const int row = thread / kPieces, piece = thread % kPieces;
  if (row < item.rows && piece * 64 < kCkvDim) {
    ptx::prefetch(p.q_nope + piece * 64 +
                  row_offset(p, item.q_begin, item.row_begin + row, p.q_nope_token_stride,
                             p.q_nope_head_stride));
  }
}

template <class T>
MLA_DEVICE Work begin(const Params& p) {
  const CtaWork* work =
      reinterpret_cast<const CtaWork*>(p.plan + kCtaWorkOffset) + ptx::block_index();
  const WorkItem item = load_item(&work->first);
  const ptx::U2 further = ptx::ld_const(reinterpret_cast<const ptx::U2*>(&work->more_begin));
  const int more = static_cast<int>(further.x);
  if constexpr (MLA_FP8KV_HAS_DEPENDENT_LAUNCH) prefetch<T>(p, item);
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  return {item, more, more + static_cast<int>(further.y)};
}

MLA_DEVICE WorkItem further_item(const Params& p, int index) {
  return load_item(reinterpret_cast<const WorkItem*>(p.plan) + index);
}

// Each architecture compiles one conversion. PlaceBits: widen by bit placement even where the
// hardware converts (SM80 and SM86 always do).
template <bool PlaceBits>
constexpr Dequant kDequant =
    PlaceBits || !MLA_FP8KV_HAS_CVT_E4M3 ? Dequant::kPlaceBits : Dequant::kConvert;

template <class T, Format F, bool PlaceBits>
MLA_DEVICE void attend_items(const Params& p) {
  auto [item, more, more_end] = begin<T>(p);
  if (item.rows == 0) return;
  if constexpr (T::kGroupScales) take_part<T>(item);

  const uint32_t shared = ptx::shared_base();
  Attend<T, F, kDequant<PlaceBits>> attend(p, shared);
  Loader<T> loader(p, item, more, more_end, shared);
  constexpr int kGroups = Loader<T>::kTileGroups;
  // Groups that need not have landed when a tile is refilled. The page indices must have, and where
  // warps share loads the next tile, before the barrier that lets others read it: of two slots that
  // is the last one asked for.
  constexpr int kInFlight = T::kOwnLoads || T::kSlots > 2 ? 1 : 0;
  // The loads of Q fit between the page indices and the rows of KV that wait for them; but indices
  // and Q do not both fit the registers beside wgmma's or the scores of two token blocks.
  constexpr bool kFillFirst = T::kWgmma || T::kQkBlocks > 1;
  if constexpr (kFillFirst) loader.fill();
  bool first_item = true;
  int slot = 0;
  while (true) {
    attend.load_q(item);
    if (first_item) {
      if constexpr (!kFillFirst) loader.fill();
      if constexpr (!T::kOwnLoads) ptx::cp_async_wait<(T::kSlots - 1) * kGroups>();
      first_item = false;
    }
    attend.stage_q();

    for (int position = item.kv_begin; position < item.kv_end; position += T::kTokens) {
      if constexpr (T::kOwnLoads) {  // a warp multiplies the rows it fetched itself
        ptx::cp_async_wait<(T::kSlots - 1) * kGroups>();
        ptx::sync_warp();
      }
      if constexpr (T::kWgmma) {
        attend.scores_wgmma(slot);
      } else {
        attend.scores(slot);
      }
      attend.mask(item, position);
      // The first tile of an item exceeds the reference there is before any score.
      const bool exceeds = position == item.kv_begin || attend.softmax(slot);
      if constexpr (T::kWgmma) ptx::publish_to_wgmma();
      if (ptx::sync_block_or(exceeds)) attend.raise_reference(slot);
      attend.add_sums();
      if constexpr (T::kWgmma) {
        attend.output_wgmma(slot, 0);
      } else {
        attend.output(slot);
      }
      if (position + T::kTokens < item.kv_end || more != more_end) {
        ptx::cp_async_wait<kInFlight>();
        ptx::sync_block();  // everyone is done with this tile
        loader.refill(slot);
      }
      slot = slot + 1 < T::kSlots ? slot + 1 : 0;
    }

    attend.finish(item);
    if (more == more_end) break;
    item = further_item(p, more++);
    if constexpr (T::kGroupScales) take_part<T>(item);
  }
}

template <class T, Format F, bool PlaceBits>
MLA_KERNEL(T::kThreads, T::kCtasPerSm)
attention_kernel(const Params p) {
  if constexpr (T::kWgmma && !MLA_FP8KV_HAS_WGMMA) {
    ptx::trap();  // the plan gives no other GPU these tiles
  } else {
    attend_items<T, F, PlaceBits>(p);
  }
}

}  // namespace mla_fp8kv
