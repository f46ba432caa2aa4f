/*
 * The attention kernel for tiles whose products are wgmma's.
 *
 * The tensor core works on its own there, so the scores of the next tile come before the output of
 * this one, and the softmax of the next tile while the output of this one is in the making.
 */
#pragma once
#include "kernel.cuh"

namespace mla_fp8kv {

template <class T, Format F, bool PlaceBits>
MLA_KERNEL(T::kThreads, T::kCtasPerSm)
attention_wgmma_kernel(const Params p) {
#if MLA_FP8KV_HAS_WGMMA
  static_assert(T::kSlots == 3 && T::kTileSlots == 1,
                "one tile for the output, one for the scores, one in flight");
  auto [item, more, more_end] = begin(p);
  if (item.rows == 0) return;

  const uint32_t shared = ptx::shared_base();
  Attend<T, F, kDequant<PlaceBits>> attend(p, shared);
  Loader<T> loader(p, item, more, more_end, shared);
  attend.load_q(item);
  loader.fill();
  ptx::cp_async_wait<T::kSlots - 1>();
  attend.stage_q();

  bool first_tile = true;
  int slot = 0, buffer = 0;
  while (true) {
    int position = item.kv_begin;
    attend.scores_wgmma(slot, [] {});
    attend.mask(item, position);
    bool exceeds = attend.softmax(buffer);
    while (true) {
      ptx::publish_to_wgmma();
      if (first_tile) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      // For all warps: P is complete, the next tile has landed, the tile before is done with.
      if (ptx::sync_block_or(exceeds)) attend.raise_reference(buffer);
      attend.add_sums();
      position += T::kTokens;
      if (position >= item.kv_end) break;
      const int next = slot + 1 < T::kSlots ? slot + 1 : 0;
      attend.scores_wgmma(next, [&] {
        if (!first_tile) loader.refill(slot);
      });
      first_tile = false;
      attend.mask(item, position);
      exceeds = false;
      attend.output_wgmma(slot, buffer, [&](int i) {
        if (i < T::kQkRowTiles) exceeds |= attend.softmax(buffer ^ 1, 0, i);
      });
      slot = next;
      buffer ^= 1;
    }
    if (!first_tile) loader.refill(slot);
    first_tile = false;
    attend.output_wgmma(slot, buffer, [](int) {});
    slot = slot + 1 < T::kSlots ? slot + 1 : 0;
    buffer ^= 1;

    attend.finish(item);
    if (more == more_end) break;
    item = further_item(p, more++);
    attend.load_q(item);
    attend.stage_q();
  }
#else
  ptx::trap();  // the plan gives no other GPU these tiles
#endif
}

}  // namespace mla_fp8kv
