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

MLA_DEVICE Work begin(const Params& p) {
  const CtaWork* work =
      reinterpret_cast<const CtaWork*>(p.plan + kCtaWorkOffset) + ptx::block_index();
  const WorkItem item = load_item(&work->first);
  const ptx::U2 further = ptx::ld_const(reinterpret_cast<const ptx::U2*>(&work->more_begin));
  const int more = static_cast<int>(further.x);
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
MLA_KERNEL(T::kThreads, T::kCtasPerSm)
attention_kernel(const Params p) {
  auto [item, more, more_end] = begin(p);
  if (item.rows == 0) return;
  if constexpr (T::kGroupScales) take_part<T>(item);

  const uint32_t shared = ptx::shared_base();
  Attend<T, F, kDequant<PlaceBits>> attend(p, shared);
  Loader<T> loader(p, item, more, more_end, shared);
  attend.load_q(item);
  loader.fill();
  if constexpr (!T::kOwnLoads) ptx::cp_async_wait<T::kSlots - 1>();
  attend.stage_q();

  // Groups of cp.async that may be unfinished when a tile is needed: kSlots were closed before the
  // loop and kTileSlots in every round but the first, each holds one slot.
  constexpr int kSpare = T::kSlots - T::kTileSlots;
  bool first_round = true;
  int slot = 0, buffer = 0, position = item.kv_begin;
  while (true) {
    if constexpr (T::kOwnLoads) {  // a warp multiplies the rows it fetched itself
      if (first_round) {
        ptx::cp_async_wait<kSpare>();
      } else {
        ptx::cp_async_wait<kSpare - T::kTileSlots>();
      }
      ptx::sync_warp();
    }
    attend.scores(slot);
    attend.mask(item, position);
    const bool exceeds = attend.softmax(buffer);
    if constexpr (!T::kOwnLoads) {  // the next tile, before the barrier that lets other warps read
                                    // it
      if (first_round) {
        ptx::cp_async_wait<kSpare - 1>();
      } else {
        ptx::cp_async_wait<kSpare - 2>();
      }
    }
    if (ptx::sync_block_or(exceeds)) attend.raise_reference(buffer);
    attend.add_sums();
    if (!first_round) loader.refill(slot);  // everyone is done with the tile before this one
    attend.output(slot, buffer);

    first_round = false;
    slot =
        slot + T::kTileSlots < T::kSlots ? slot + T::kTileSlots : slot + T::kTileSlots - T::kSlots;
    buffer ^= 1;
    position += T::kTokens;
    if (position < item.kv_end) continue;

    attend.finish(item);
    if (more == more_end) break;
    item = further_item(p, more++);
    if constexpr (T::kGroupScales) take_part<T>(item);
    position = item.kv_begin;
    attend.load_q(item);
    attend.stage_q();
  }
}

}  // namespace mla_fp8kv
