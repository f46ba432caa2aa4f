/*
 * KV rows from the paged caches into the ring of shared-memory slots, with cp.async.
 *
 * The loader walks all tiles of a CTA, across work items, ahead of the arithmetic. Page indices are fetched two tiles
 * ahead, because the address of a row waits for them. Tokens past the end of an item are written as zeros: a slot that
 * is not referenced is never read, whatever bytes it holds.
 */
#pragma once
#include "params.h"
#include "ptx.cuh"
#include "traits.cuh"

namespace mla_fp8kv {

MLA_DEVICE uint32_t divide(uint32_t n, const Divisor& d) {
  return (ptx::mul_high(n, d.mul) + n) >> d.shift;
}

// 16-byte chunk `chunk` of row `row` inside a slot (see the note on shared memory in traits.cuh).
template <class T>
MLA_DEVICE uint32_t chunk_offset(int row, int chunk) {
  return row * T::kKvRowBytes + ((chunk ^ ((row >> 1) & 3)) * kChunkBytes);
}

template <class T>
class Loader {
 public:
  // `first` is the CTA's first work item; items [more, more_end) of the plan are its further ones.
  MLA_DEVICE Loader(const Params& p, const WorkItem& first, int more, int more_end, uint32_t shared)
      : p_(p), more_(more), more_end_(more_end), shared_(shared) {
    warp_ = ptx::thread_index() >> 5;
    lane_ = ptx::thread_index() & 31;
    position_ = first.kv_begin;
    end_ = first.kv_end;
    page_begin_ = first.page_begin;
    ahead_.left = now_.left = 0;
    fetch_following_item();
    fetch_indices();
    fetch_indices();
  }

  // Notes in shared memory where the rows of the next tile lie. At least a warp barrier must follow before issue().
  // (Shuffles would do it in place, but the compiler runs sixteen of them one after the other.)
  MLA_DEVICE void locate() {
    ptx::sync_warp();  // all lanes have read the previous tile's
    if (now_.left > 0 && lane_ < T::kLoadRows) {
      const uint32_t cell = shared_ + T::kRowOffset + 4 * (warp_ * T::kLoadRows + lane_);
      ptx::st_shared(cell, now_.page * p_.ckv_page_stride + now_.token * p_.ckv_token_stride);
      if constexpr (T::kKpeDim > 0) {
        ptx::st_shared(cell + 4 * T::kTokens,
                       now_.page * p_.kpe_page_stride + now_.token * p_.kpe_token_stride);
      }
    }
  }

  // Starts the copy of that tile into `slot`, if there is one, and closes a cp.async group either way, so that counting
  // groups counts tiles. (Both conditions are the same for the whole CTA in a way the compiler can see.)
  MLA_DEVICE void issue(int slot) {
    if (now_.left > 0) {
      if (now_.left >= T::kTokens) {
        copy_rows<true>(slot);
      } else {
        copy_rows<false>(slot);
      }
      fetch_indices();
    }
    ptx::cp_async_commit();
  }

 private:
  // This warp's rows of one tile: lane l holds where row l % kLoadRows lies.
  struct TileRows {
    int32_t page;
    int32_t token;  // within the page
    int32_t left;   // tokens of the item from the tile's first on, 0: no tile
  };

  MLA_DEVICE void fetch_following_item() {
    if (more_ < more_end_) {
      const WorkItem* item = reinterpret_cast<const WorkItem*>(p_.plan) + more_;
      const ptx::U4 v = ptx::ld_const(reinterpret_cast<const ptx::U4*>(item) + 1);
      next_page_begin_ = static_cast<int32_t>(v.x);
      next_begin_ = static_cast<int32_t>(v.y);
      next_end_ = static_cast<int32_t>(v.z);
    }
  }

  // now <- ahead <- the tile at the walking position; then one tile further.
  MLA_DEVICE void fetch_indices() {
    now_ = ahead_;
    ahead_.left = 0;
    if (position_ >= end_) return;
    const int row = position_ + warp_ * T::kLoadRows + lane_ % T::kLoadRows;
    const uint32_t token = row < end_ ? row : end_ - 1;
    const uint32_t page = divide(token, p_.page_size);
    ahead_.page = ptx::ld_const(p_.kv_indices + page_begin_ + page);
    ahead_.token = token - page * p_.page_size.value;
    ahead_.left = end_ - position_;
    position_ += T::kTokens;
    if (position_ >= end_ && more_ < more_end_) {
      page_begin_ = next_page_begin_;
      position_ = next_begin_;
      end_ = next_end_;
      ++more_;
      fetch_following_item();
    }
  }

  template <bool Full>
  static MLA_DEVICE void copy(uint32_t dst, const uint8_t* src, bool valid) {
    if constexpr (Full) {
      ptx::cp_async_16(dst, src);
    } else {
      ptx::cp_async_16_or_zero(dst, src, valid);
    }
  }

  template <bool Full>
  MLA_DEVICE void copy_rows(int slot) {
    const int row0 = warp_ * T::kLoadRows;
    const uint32_t base = shared_ + T::kRingOffset + slot * T::kSlotBytes + row0 * T::kKvRowBytes;
    const uint32_t located = shared_ + T::kRowOffset + 4 * row0;
    // ckv: one whole row of 512 B an instruction (1 to 2 us better over 32 x 8192 tokens than 8 rows x 64 B).
    const uint8_t* ckv = p_.ckv + lane_ * kChunkBytes;
#pragma unroll
    for (int r = 0; r < T::kLoadRows; r += 4) {
      ptx::U4 offset;
      ptx::ld_shared(offset, located + 4 * r);
      const uint32_t offsets[4] = {offset.x, offset.y, offset.z, offset.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy<Full>(base + chunk_offset<T>(r + i, lane_), ptx::advance(ckv, offsets[i]),
                   row0 + r + i < now_.left);
      }
    }
    if constexpr (T::kKpeDim > 0) {
      const int g = lane_ >> 2, t = lane_ & 3;
      const uint8_t* kpe = p_.kpe + t * kChunkBytes;
#pragma unroll
      for (int r = 0; r < T::kLoadRows; r += 8) {
        uint32_t offset;
        ptx::ld_shared(offset, located + 4 * T::kTokens + 4 * (r + g));
        copy<Full>(base + chunk_offset<T>(r + g, kCkvDim / kChunkBytes + t),
                   ptx::advance(kpe, offset), row0 + r + g < now_.left);
      }
    }
    if constexpr (T::kGroupScales) {
      if (lane_ < T::kLoadRows) {
        const int64_t row = int64_t{now_.page} * p_.page_size.value + now_.token;
        copy<Full>(shared_ + T::kScaleRingOffset + slot * T::kScaleSlotBytes +
                       (row0 + lane_) * kScaleGroups * 4,
                   reinterpret_cast<const uint8_t*>(p_.group_scales + row * kScaleGroups),
                   row0 + lane_ < now_.left);
      }
    }
  }

  const Params& p_;
  int more_, more_end_;
  uint32_t shared_;
  int warp_, lane_;
  int position_, end_, page_begin_;
  int next_page_begin_ = 0, next_begin_ = 0, next_end_ = 0;
  TileRows now_, ahead_;
};

}  // namespace mla_fp8kv
