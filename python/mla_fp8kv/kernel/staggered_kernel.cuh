/*
 * The attention kernel for tiles of wgmma's that fill an SM alone.
 *
 * Two warpgroups share a tile: each has the scores and P of its own half of the tokens, and its
 * half of the dims of the output for all tokens. They work half a tile apart, so that the tensor
 * core has the products of one while the other one is at its softmax. All halves pass in one order,
 * 0, 1 of the first tile, 0, 1 of the next: a warpgroup adds the other's half that came before and
 * then its own, and what a half does to the references reaches the output of both in that order.
 */
#pragma once
#include "kernel.cuh"

namespace mla_fp8kv {

template <class T, Format F, bool PlaceBits>
MLA_KERNEL(T::kThreads, T::kCtasPerSm)
attention_staggered_kernel(const Params p) {
#if MLA_FP8KV_HAS_WGMMA
  using A = Attend<T, F, kDequant<PlaceBits>>;
  static_assert(T::kSlots == 2 && T::kOwnLoads && T::kThreads == 256, "two warpgroups, two tiles");
  auto [item, more, more_end] = begin<T>(p);
  if (item.rows == 0) return;

  const uint32_t shared = ptx::shared_base();
  A attend(p, shared);
  Loader<T> loader(p, item, more, more_end, shared);
  loader.fill();
  const int own = ptx::warp_index() / 4, other = own ^ 1;
  int slot = 0;
  bool filled = true;  // the next tile came with fill()
  while (true) {
    attend.load_q(item);
    attend.stage_q();

    for (int position = item.kv_begin; position < item.kv_end; position += T::kTokens) {
      const bool first = position == item.kv_begin;
      if (filled) {
        ptx::cp_async_wait<Loader<T>::kTileGroups>();
      } else {
        ptx::cp_async_wait<0>();
      }
      filled = false;
      ptx::sync_warp();  // a warp multiplies the rows it fetched itself
      attend.scores_wgmma(slot);
      attend.mask(item, position);
      if (!first) {
        ptx::sync_at<256>(A::kDoneBarrier + own);
        loader.refill(slot ^ 1);
      }
      // The references are those of the half before.
      if (own == 1 || !first) ptx::sync_at<256>(A::kReadyBarrier + other);
      // The first half of an item exceeds the reference there is before any score.
      bool exceeds = (first && own == 0) || attend.softmax(slot);
      ptx::publish_to_wgmma();
      exceeds = ptx::sync_at_or<128>(A::kOwnBarrier + own, exceeds);
      if (exceeds) attend.raise_reference_of_half(slot);
      attend.note_raise(own, exceeds);
      ptx::arrive_at<256>(A::kReadyBarrier + own);

      if (own == 1 || !first) {
        if (attend.raised_by(other)) attend.shrink(other);
        attend.output_wgmma(own == 1 ? slot : slot ^ 1, other);
        ptx::arrive_at<256>(A::kDoneBarrier + other);
      }
      if (exceeds) attend.shrink(own);
      attend.add_sums();
      attend.output_wgmma(slot, own);
      slot ^= 1;
    }
    if (own == 0) {
      ptx::sync_at<256>(A::kReadyBarrier + other);
      if (attend.raised_by(other)) attend.shrink(other);
      attend.output_wgmma(slot ^ 1, other);
      ptx::arrive_at<256>(A::kDoneBarrier + other);
    }
    ptx::cp_async_wait<1>();  // the page indices
    ptx::sync_at<256>(A::kDoneBarrier + own);
    loader.refill(slot ^ 1);
    ptx::sync_block();  // sums take the place of locations

    attend.finish(item);
    if (more == more_end) break;
    item = further_item(p, more++);
  }
#else
  ptx::trap();  // the plan gives no other GPU these tiles
#endif
}

}  // namespace mla_fp8kv
