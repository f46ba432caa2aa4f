/*
 * The attention kernel: the order of things and nothing else.
 *
 * One persistent CTA walks the work items the plan gave it. Loads run ahead of the arithmetic across items.
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

template <class T, Format F, Dequant D>
MLA_KERNEL(T::kThreads, T::kCtasPerSm)
attention_kernel(const Params p) {
  const CtaWork* work =
      reinterpret_cast<const CtaWork*>(p.plan + kCtaWorkOffset) + ptx::block_index();
  WorkItem item = load_item(&work->first);
  const ptx::U2 further = ptx::ld_const(reinterpret_cast<const ptx::U2*>(&work->more_begin));
  const WorkItem* more = reinterpret_cast<const WorkItem*>(p.plan) + further.x;
  int more_left = static_cast<int>(further.y);

  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  if (item.rows == 0) return;

  const uint32_t shared = ptx::shared_base();
  Attend<T, F, D> attend(p, shared);
  Loader<T> loader(p, item, more, more_left, shared);
  attend.load_q(item);
#pragma unroll
  for (int slot = 0; slot < T::kStages; ++slot) loader.issue(slot);
  if constexpr (T::kSharedLoads) ptx::cp_async_wait<T::kStages - 1>();
  attend.stage_q();

  // Groups are closed by all threads in step: kStages before the loop, one in each round but the first.
  int slot = 0, refill = T::kStages - 1, position = item.kv_begin;
  for (int round = 0;; ++round) {
    const int buffer = round & 1;
    if constexpr (!T::kSharedLoads) {  // a warp multiplies the rows it fetched itself
      if (round == 0) {
        ptx::cp_async_wait<T::kStages - 1>();
      } else {
        ptx::cp_async_wait<T::kStages - 2>();
      }
      ptx::sync_warp();
    }
    attend.scores(slot);
    const int first_end = item.causal_end + static_cast<int>(divide(item.row_begin, p.heads));
    if (position + T::kTokens > (first_end < item.kv_end ? first_end : item.kv_end)) {
      attend.mask(item, position);
    }
    const bool exceeds = attend.softmax(buffer);
    if constexpr (T::kSharedLoads) {  // the next tile, before the barrier that lets other warps read it
      if (round == 0) {
        ptx::cp_async_wait<T::kStages - 2>();
      } else {
        ptx::cp_async_wait<T::kStages - 3>();
      }
    }
    if (ptx::sync_block_or(exceeds)) attend.raise_reference(buffer);
    attend.add_sums();
    if (round > 0) loader.issue(refill);  // into the slot whose tile everyone has finished
    attend.output(slot, buffer);

    slot = slot + 1 == T::kStages ? 0 : slot + 1;
    refill = refill + 1 == T::kStages ? 0 : refill + 1;
    position += T::kTokens;
    if (position < item.kv_end) continue;

    attend.finish(item);
    if (more_left == 0) break;
    item = load_item(more);
    ++more;
    --more_left;
    position = item.kv_begin;
    attend.load_q(item);
    attend.stage_q();
  }
}

}  // namespace mla_fp8kv
