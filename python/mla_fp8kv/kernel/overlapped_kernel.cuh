/*
 * The attention kernel for tiles of wgmma's that fill an SM alone.
 *
 * The tensor core works on its own, so the scores of the next tile come before the output of this
 * one, and the softmax of the next tile while the output of this one is in the making.
 */
#pragma once
#include "kernel.cuh"

namespace mla_fp8kv {

template <class T, Format F, bool PlaceBits>
MLA_KERNEL(T::kThreads, T::kCtasPerSm)
attention_overlapped_kernel(const Params p) {
#if MLA_FP8KV_HAS_WGMMA
  static_assert(T::kSlots == 3 && T::kOverlapped,
                "one tile for the output, one for the scores, one in flight");
  auto [item, more, more_end] = begin<T>(p);
  if (item.rows == 0) return;

  const uint32_t shared = ptx::shared_base();
  Attend<T, F, kDequant<PlaceBits>> attend(p, shared);
  Loader<T> loader(p, item, more, more_end, shared);
  loader.fill();
  bool first_tile = true;
  int slot = 0, buffer = 0;
  const auto after = [](int slot) { return slot + 1 < T::kSlots ? slot + 1 : 0; };
  while (true) {
    attend.load_q(item);
    if (first_tile) ptx::cp_async_wait<(T::kSlots - 1) * Loader<T>::kTileGroups>();
    attend.stage_q();

    int position = item.kv_begin;
    attend.scores_wgmma(slot, [] {});
    attend.mask(item, position);
    bool exceeds = true;  // the reference there is before any score
    while (true) {
      ptx::publish_to_wgmma();
      if (first_tile) {
        ptx::cp_async_wait<Loader<T>::kTileGroups>();
      } else {
        ptx::cp_async_wait<0>();
      }
      // For all warps: P is complete, the next tile has landed, the tile before is done with.
      if (ptx::sync_block_or(exceeds)) attend.raise_reference(buffer);
      attend.add_sums();
      position += T::kTokens;
      if (position >= item.kv_end) break;
      const int next = after(slot);
      attend.scores_wgmma(next, [&] {
        if (!first_tile) loader.refill(after(next));
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
    if (!first_tile) loader.refill(after(after(slot)));
    first_tile = false;
    attend.output_wgmma(slot, buffer, [](int) {});
    slot = after(slot);
    buffer ^= 1;

    attend.finish(item);
    if (more == more_end) break;
    item = further_item(p, more++);
  }
#else
  ptx::trap();  // the plan gives no other GPU these tiles
#endif
}

}  // namespace mla_fp8kv
