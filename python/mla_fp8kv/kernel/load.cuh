/*
 * KV rows from the paged caches into the ring of shared-memory slots, with cp.async.
 *
 * The loader walks all tiles of a CTA, across work items, ahead of the arithmetic. Tokens past the
 * end of an item are written as zeros: a row of the cache that is not referenced is never read,
 * whatever bytes it holds.
 */
#pragma once
#include "params.h"
#include "ptx.cuh"
#include "traits.cuh"

namespace mla_fp8kv {

MLA_DEVICE uint32_t divide(uint32_t n, const Divisor& d) {
  return (ptx::mul_high(n, d.mul) + n) >> d.shift;
}

// Element of Q or out, [tokens, heads, dims], at which packed row `row` of a request begins.
MLA_DEVICE int64_t row_offset(const Params& p, int32_t q_begin, uint32_t row, int64_t token_stride,
                              int64_t head_stride) {
  const uint32_t query = divide(row, p.heads);
  const int64_t token = q_begin + query;
  const int64_t head = row - query * p.heads.value;
  return token * token_stride + head * head_stride;
}

// 16-byte chunk `chunk` of row `row` inside a slot, of ckv and of kpe (see the note on shared
// memory in traits.cuh).
template <class T>
MLA_DEVICE uint32_t ckv_offset(int row, int chunk) {
  const int swizzle = T::kStaggered ? row & 7 : (row >> 1) & 3;
  return row * T::kKvRowBytes + (chunk ^ swizzle) * kChunkBytes;
}
template <class T>
MLA_DEVICE uint32_t kpe_offset(int row, int chunk) {
  const uint32_t at =
      T::kStaggered ? T::kTokens * kCkvDim + row * kKpeRowBytes : row * T::kKvRowBytes + kCkvDim;
  return at + (chunk ^ ((row >> 1) & 3)) * kChunkBytes;
}

template <class T>
class Loader {
 public:
  // `first` is the CTA's first work item; items [more, more_end) of the plan are its further ones.
  // Asks for the page indices of the first tiles.
  MLA_DEVICE Loader(const Params& p, const WorkItem& first, int more, int more_end, uint32_t shared)
      : p_(p), more_(more), more_end_(more_end), shared_(shared) {
    warp_ = ptx::thread_index() >> 5;
    lane_ = ptx::thread_index() & 31;
    walk_ = {first.kv_begin, first.kv_end, first.page_begin};
    fetch_following_item();
#pragma unroll
    for (int i = 0; i < T::kSlots; ++i) {
      first_[i] = walk_;
      first_page_[i] = 0;
      if (first_[i].left() > 0) first_page_[i] = ptx::ld_const(index_of(first_[i]));
      step();
    }
  }

  // Starts the copy of the first tiles, one to a slot. Here and in refill(), whether or not there
  // is something to load, each tile closes a group of cp.async, after one with the page indices of
  // the tile that comes next: kTileGroups a tile.
  MLA_DEVICE void fill() {
#pragma unroll
    for (int i = 0; i < T::kSlots; ++i) {
      locate(first_[i], first_page_[i]);
      if (i == T::kSlots - 1) fetch_index();
      ptx::cp_async_commit();
      ptx::sync_warp();
      copy_rows(first_[i].left(), i);
      ptx::sync_warp();  // before locations are overwritten
    }
  }
  static constexpr int kTileGroups = 2;

  // Starts the copy of the next tile into `slot`. Its page indices must have landed: all groups but
  // the last one.
  MLA_DEVICE void refill(int slot) {
    const Place tile = next_;
    uint32_t page = 0;
    if (tile.left() > 0 && lane_ < T::kWarpTokens) ptx::ld_shared(page, index_cell());
    locate(tile, page);
    fetch_index();
    ptx::cp_async_commit();
    ptx::sync_warp();
    copy_rows(tile.left(), slot);
    ptx::sync_warp();  // before locations are overwritten
  }

 private:
  // A tile: tokens [position, end) of a request, or as many of them as a tile has. The same for the
  // whole CTA in a way the compiler can see, so that branches on it cost nothing.
  struct Place {
    int32_t position, end, page_begin;
    MLA_DEVICE int left() const { return end - position; }  // <= 0: there is no tile
  };

  MLA_DEVICE void fetch_following_item() {
    if (more_ < more_end_) {
      const WorkItem* item = reinterpret_cast<const WorkItem*>(p_.plan) + more_;
      const ptx::U4 v = ptx::ld_const(reinterpret_cast<const ptx::U4*>(item) + 1);
      following_ = {static_cast<int32_t>(v.y), static_cast<int32_t>(v.z),
                    static_cast<int32_t>(v.x)};
    }
  }

  MLA_DEVICE void step() {
    walk_.position += T::kTokens;
    if (walk_.left() <= 0 && more_ < more_end_) {
      walk_ = following_;
      ++more_;
      fetch_following_item();
    }
  }

  // The token of this lane's row; past the end, the last one.
  MLA_DEVICE uint32_t token_of(const Place& tile) const {
    const int token = tile.position + warp_ * T::kWarpTokens + lane_ % T::kWarpTokens;
    return token < tile.end ? token : tile.end - 1;
  }
  MLA_DEVICE const int32_t* index_of(const Place& tile) const {
    return p_.kv_indices + tile.page_begin + divide(token_of(tile), p_.page_size);
  }

  // Asks for the page indices of the tile at the walking position, a tile before its rows:
  // addresses wait for them. They come with cp.async, so that the loop has no ordinary load whose
  // scoreboard (there are six) the compiler might share with another wait.
  MLA_DEVICE void fetch_index() {
    next_ = walk_;
    if (next_.left() > 0) {
      if (lane_ < T::kWarpTokens) ptx::cp_async_4(index_cell(), index_of(next_));
      step();
    }
  }
  MLA_DEVICE uint32_t index_cell() const {
    return shared_ + T::kIndexOffset + 4 * (warp_ * T::kWarpTokens + lane_);
  }

  // Where this warp's rows lie: ckv, then kpe; with group scales, then the scales.
  MLA_DEVICE uint32_t location(int row) const {
    return shared_ + T::kLocationOffset + warp_ * T::kLocationStride + 4 * row;
  }

  // Notes it for all lanes to read. (Instead of shuffles, which the compiler issues one after the
  // other's result.)
  MLA_DEVICE void locate(const Place& tile, uint32_t page) const {
    const uint32_t token = token_of(tile);
    const uint32_t in_page = token - divide(token, p_.page_size) * p_.page_size.value;
    if (lane_ < T::kWarpTokens) {
      ptx::st_shared(location(lane_), page * p_.ckv_page_stride + in_page * p_.ckv_token_stride);
      if constexpr (T::kKpeDim > 0) {
        ptx::st_shared(location(T::kWarpTokens + lane_),
                       page * p_.kpe_page_stride + in_page * p_.kpe_token_stride);
      }
      if constexpr (T::kGroupScales) {
        ptx::st_shared(location(2 * T::kWarpTokens + lane_), page * p_.page_size.value + in_page);
      }
    }
  }

  // `left` tokens of the tile exist, if it has so many.
  MLA_DEVICE void copy_rows(int left, int slot) const {
    if (left >= T::kTokens) {
      copy_rows_of<true>(left, slot);
    } else if (left > 0) {
      copy_rows_of<false>(left, slot);
    }
    ptx::cp_async_commit();
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
  MLA_DEVICE void copy_rows_of(int left, int slot) const {
    const int begin = warp_ * T::kWarpTokens;
    const int valid = left - begin;  // rows of this warp below this exist
    const uint32_t base = shared_ + T::kRingOffset + slot * T::kSlotBytes;
    // ckv: one whole row of 512 B an instruction (in an earlier kernel of this design 1 to 2 us
    // better over 32 x 8192 tokens than 8 rows x 64 B).
    const uint8_t* ckv = p_.ckv + lane_ * kChunkBytes;
#pragma unroll
    for (int r = 0; r < T::kWarpTokens; r += 4) {
      ptx::U4 at;
      ptx::ld_shared(at, location(r));
      const uint32_t offset[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy<Full>(base + begin * T::kKvRowBytes + ckv_offset<T>(r + i, lane_),
                   ptx::advance(ckv, offset[i]), r + i < valid);
      }
    }
    if constexpr (T::kKpeDim > 0) {
      const int chunk = lane_ & 3;
#pragma unroll
      for (int r = 0; r < T::kWarpTokens; r += 8) {
        const int row = r + (lane_ >> 2);
        uint32_t offset;
        ptx::ld_shared(offset, location(T::kWarpTokens + row));
        copy<Full>(base + begin * (T::kStaggered ? kKpeRowBytes : T::kKvRowBytes) +
                       kpe_offset<T>(row, chunk),
                   ptx::advance(p_.kpe + chunk * kChunkBytes, offset), row < valid);
      }
    }
    if constexpr (T::kGroupScales) {
      if (lane_ < T::kWarpTokens) {
        uint32_t offset;
        ptx::ld_shared(offset, location(2 * T::kWarpTokens + lane_));
        copy<Full>(shared_ + T::kScaleRingOffset + slot * T::kScaleSlotBytes +
                       (begin + lane_) * kScaleGroups * 4,
                   ptx::advance(reinterpret_cast<const uint8_t*>(p_.group_scales), offset),
                   lane_ < valid);
      }
    }
  }

  const Params& p_;
  int more_, more_end_;
  uint32_t shared_;
  int warp_, lane_;
  Place walk_;              // the tile whose page indices are asked for next
  Place next_ = {};         // the tile whose rows are asked for next
  Place following_;         // the first tile of the item after the one at walk_
  Place first_[T::kSlots];  // until fill()
  uint32_t first_page_[T::kSlots];
};

}  // namespace mla_fp8kv
