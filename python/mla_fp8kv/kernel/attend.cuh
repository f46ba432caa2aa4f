/*
 * The arithmetic on one tile of KV: scores, softmax, output; and what comes before and after the
 * tiles of a work item.
 *
 * Softmax is online and lazy: P = 2^(score - reference), where the reference of a row only moves
 * when a score exceeds it by more than kSlack (P then stays below 2^kSlack, harmless in FP16). Most
 * tiles therefore need one barrier: the one that hands P from the warps that computed it to all
 * warps.
 */
#pragma once
#include "dequant.cuh"
#include "load.cuh"
#include "params.h"
#include "ptx.cuh"
#include "traits.cuh"

namespace mla_fp8kv {

#ifndef MLA_FP8KV_LOADS_ONLY
#define MLA_FP8KV_LOADS_ONLY \
  0  // 1: keep the loads and drop the products, to measure what the loads alone cost
#endif

constexpr float kSlack = 8.f;
constexpr float kMasked = -__builtin_huge_valf();
constexpr float kSmallestFactor = 1.17549435e-38f;  // makes any score a logit of 0

template <class T, Format F, Dequant D>
class Attend {
 public:
  MLA_DEVICE Attend(const Params& p, uint32_t shared) : p_(p), shared_(shared) {
    lane_ = ptx::thread_index() & 31;
    // Visibly uniform for wgmma, whose matrices then have uniform addresses; not elsewhere, where
    // it costs registers and gains nothing.
    warp_ = T::kWgmma ? ptx::warp_index() : ptx::thread_index() >> 5;
    g_ = lane_ >> 2;
    t_ = lane_ & 3;
    token_group_ = warp_ % T::kTokenGroups;
    row_group_ = warp_ / T::kTokenGroups;
    const int row = lane_ & 15, chunk = lane_ >> 4;
    even_ = ckv_offset<T>(row, chunk);
    odd_ = ckv_offset<T>(row, chunk + 2);
  }

  // ---- Q

  // Fetches this thread's share of Q: 8 neighbouring elements of one row in every piece it owns.
  MLA_DEVICE void load_q(const WorkItem& item) {
    const int row = 8 * q_row_tile() + g_;
    const auto piece = [&](const uint16_t* q, int64_t token_stride, int64_t head_stride) {
      return q + 8 * t_ +
             row_offset(p_, item.q_begin, item.row_begin + row, token_stride, head_stride);
    };
    const uint16_t* nope = piece(p_.q_nope, p_.q_nope_token_stride, p_.q_nope_head_stride);
    const uint16_t* pe = piece(p_.q_pe, p_.q_pe_token_stride, p_.q_pe_head_stride);
#pragma unroll
    for (int i = 0; i < T::kQPieces; ++i) {
      q_[i] = {0, 0, 0, 0};
      const int piece = q_piece(i);
      const uint16_t* q = is_pe(i) ? pe + 32 * (piece - T::kCkvSteps / 2) : nope + 32 * piece;
      if (row < item.rows && has_piece(i)) {
        q_[i] = ptx::ld_const(reinterpret_cast<const ptx::U4*>(q));
      }
    }
  }

  // Stages Q as MMA fragments, in FP16: rows of BF16 are scaled by a power of two into its range
  // (exact: FP16 has more mantissa). Ends with a barrier; needs one before it if shared memory is
  // in use.
  MLA_DEVICE void stage_q() {
    float scale_down = 1.f;
    if (p_.q_is_bf16) {
      const float scale_up = q_scale(scale_down);
#pragma unroll
      for (int i = 0; i < T::kQPieces; ++i) {
        store_q(i, bf16_fragment(q_[i].x, q_[i].y, scale_up),
                bf16_fragment(q_[i].z, q_[i].w, scale_up));
      }
    } else {
#pragma unroll
      for (int i = 0; i < T::kQPieces; ++i) {
        store_q(i, f16_fragment(q_[i].x, q_[i].y), f16_fragment(q_[i].z, q_[i].w));
      }
    }
    if (warp_ < T::kRowTiles && t_ == 0) {
      const int row = 8 * warp_ + late(g_);
      // Never 0 (sm_scale 0, or too small for such a row): 0 x -inf is no masked score.
      const float factor = p_.score_scale * Widen<F, D>::kScale * scale_down;
      ptx::st_shared(row_state(row), ptx::U2{ptx::as_bits(ptx::max(factor, kSmallestFactor)),
                                             ptx::as_bits(kNoReference)});
    }
    if constexpr (T::kWgmma) ptx::publish_to_wgmma();
    ptx::sync_block();
    zero(sum_);
    if constexpr (!T::kWgmma) {
#pragma unroll
      for (int n = 0; n < T::kQkRowTiles; ++n) {
        read_row_state(n, factor_[n], reference_[n]);
        reference_[n][0] = reference_[n][1] = kNoReference;  // so that the compiler knows it
      }
    }
#pragma unroll
    for (int d = 0; d < T::kDimBlocks; ++d)
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) out_[d][n][c] = 0.f;
    out_exponent_ = kNoExponent;
  }

  // ---- one tile

  // S^T of this warp's tokens and rows, in the units of the MMA.
  MLA_DEVICE void scores(int slot) {
    // Few row tiles leave the tensor core waiting for its own accumulator: split k over several
    // chains.
    constexpr int kChains = T::kGroupScales || T::kQkBlocks > 1 ? 1
                            : T::kQkRowTiles == 1               ? 4
                            : T::kQkRowTiles == 2               ? 2
                                                                : 1;
    const uint32_t tile = tile_address(slot) + token_group_ * T::kQkBlocks * 16 * T::kKvRowBytes;
    float acc[T::kQkBlocks][T::kQkRowTiles][kChains][4];
    constexpr int kPairs = T::kQkSteps / 2, kCkvPairs = T::kCkvSteps / 2;
    constexpr int kPePairs = kPairs - kCkvPairs;
    zero(acc);
    zero(score_);
    NanFinder nan[T::kQkBlocks][2];
    const auto multiply = [&](int pair) {  // 32 dims
      uint32_t k[T::kQkBlocks][2][4];
#pragma unroll
      for (int b = 0; b < T::kQkBlocks; ++b) {
        uint32_t word[4];  // rows g and g+8 of one k-step, rows g and g+8 of the next
        ptx::ldmatrix_x4(
            word, tile + ((pair & 1) ? odd_ : even_) + (pair >> 1) * 64 + b * 16 * T::kKvRowBytes);
        if constexpr (Widen<F, D>::kHidesNan) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t signs = word[i] & kSigns;
            // Shared with the conversion; but kept that long, they spill beside more rows.
            nan[b][i & 1].look(word[i], T::kRowTiles <= 2 ? ptx::as_written(signs) : signs);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Widen<F, D>::k_word(word[i], k[b][i >> 1][i & 1], k[b][i >> 1][(i & 1) + 2]);
        }
      }
      uint32_t q[2][T::kQkRowTiles][2];
      load_q_fragments(pair, q);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < T::kQkRowTiles; ++n)
#pragma unroll
          for (int b = 0; b < T::kQkBlocks; ++b) {
            ptx::mma_m16n8k16_f16(acc[b][n][(2 * pair + half) % kChains], k[b][half], q[half][n][0],
                                  q[half][n][1]);
          }
    };
    // kpe comes first: it has its own scale, which in FP32 costs no bits of Q.
    if constexpr (kPePairs > 0 && !MLA_FP8KV_LOADS_ONLY) {
#pragma unroll
      for (int i = 0; i < kPePairs; ++i) multiply(kCkvPairs + i);
      scale_all(acc, p_.pe_ratio);
    }
    if constexpr (T::kGroupScales) move_to_scores(acc);
#pragma unroll
    for (int pair = 0; pair < (MLA_FP8KV_LOADS_ONLY ? 0 : kCkvPairs); ++pair) {
      multiply(pair);
      if constexpr (T::kGroupScales) {
        constexpr int kPairsPerGroup = kScaleGroupDims / 32;
        if (pair % kPairsPerGroup == kPairsPerGroup - 1) {
          add_scaled_group(slot, pair / kPairsPerGroup, acc);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < T::kQkBlocks; ++b)
#pragma unroll
      for (int n = 0; n < T::kQkRowTiles; ++n)
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain)
#pragma unroll
          for (int c = 0; c < 4; ++c) score_[b][n][c] += acc[b][n][chain][c];
    if constexpr (Widen<F, D>::kHidesNan) {
#pragma unroll
      for (int b = 0; b < T::kQkBlocks; ++b) poison(nan[b], score_[b]);
    }
  }

  // The same with wgmma.
  MLA_DEVICE void scores_wgmma(int slot) {
    static_assert(!Widen<F, D>::kHidesNan, "SM90 converts");
    zero(score_);
    constexpr int kGroups = T::kQkSteps / 4;  // of 64 dims
    if constexpr (MLA_FP8KV_LOADS_ONLY) return;
    constexpr int kPeGroups = T::kKpeDim / 64;
    const auto dims = [](int i) { return i < kPeGroups ? kGroups - kPeGroups + i : i - kPeGroups; };
    const uint32_t tile = tile_address(slot) + token_group_ * 16 * T::kKvRowBytes;
    const uint32_t q_16 = ptx::not_hoisted((shared_ + T::kQOffset) >> 4);
    uint32_t word[2][4];  // each: rows g and g+8 of one k-step, rows g and g+8 of the next
    uint32_t k[2][4][4];  // four k-steps in use by the tensor core, four in the making
    const auto fetch = [&](int i) {
      if (T::kStaggered && i < kPeGroups) {
        const int row = token_group_ * 16 + (lane_ & 15), chunk = lane_ >> 4;
        ptx::ldmatrix_x4(word[0], tile_address(slot) + kpe_offset<T>(row, chunk));
        ptx::ldmatrix_x4(word[1], tile_address(slot) + kpe_offset<T>(row, chunk + 2));
      } else {
        ptx::ldmatrix_x4(word[0], tile + at_64_dims(even_, dims(i)));
        ptx::ldmatrix_x4(word[1], tile + at_64_dims(odd_, dims(i)));
      }
    };
    const auto widen = [&](uint32_t (&to)[4][4]) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t (&step)[4] = to[2 * i + (j >> 1)];
          Widen<F, D>::k_word(word[i][j], step[j & 1], step[(j & 1) + 2]);
        }
    };
    fetch(0);
    widen(k[0]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i + 1 < kGroups) fetch(i + 1);
      ptx::wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma<false>(score_[0], k[i & 1][step],
                          ptx::wgmma_matrix(q_16 + 2 * (4 * dims(i) + step) * kCoreRow / 16,
                                            kCoreRow, kCoreBytes));
      }
      ptx::wgmma_commit();
      if (i + 1 == kPeGroups) {  // kpe has its own scale
        widen(k[(i + 1) & 1]);
        ptx::wgmma_wait<0>();
        ptx::wgmma_result(score_[0]);
        scale_all(score_, p_.pe_ratio);
      } else {
        ptx::wgmma_wait<1>();
        if (i + 1 < kGroups) widen(k[(i + 1) & 1]);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_result(score_[0]);
  }

  // Scores of tokens a row must not see become -inf. `position` is the tile's first token.
  MLA_DEVICE void mask(const WorkItem& item, int position) {
    const int first_end = item.causal_end + static_cast<int>(divide(item.row_begin, p_.heads));
    if (position + T::kTokens > (first_end < item.kv_end ? first_end : item.kv_end)) {
      mask_tokens(item, position);
    }
  }
  MLA_DEVICE void mask_tokens(const WorkItem& item, int position) {
#pragma unroll
    for (int n = 0; n < T::kQkRowTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query = divide(item.row_begin + qk_row(n, c), p_.heads);
        const int causal = item.causal_end + query;
        const int end = causal < item.kv_end ? causal : item.kv_end;
#pragma unroll
        for (int b = 0; b < T::kQkBlocks; ++b) {
          const int token = position + qk_token(b);
          if (token >= end) score_[b][n][c] = kMasked;
          if (token + 8 >= end) score_[b][n][c + 2] = kMasked;
        }
      }
    }
  }

  // P of this warp's tokens and rows. True if a score is too far above its reference.
  MLA_DEVICE bool softmax(int slot) {
    return softmax(slot, [](int, float (&)[2]) {});
  }
  // `adjust(n, reference)` may change the references of two rows.
  template <class Adjust>
  MLA_DEVICE bool softmax(int slot, Adjust adjust) {
    bool exceeds = false;
    float sum[T::kQkRowTiles][2];
    zero(sum);
    // Row tiles whose state is fetched before the first exponential; from shared memory, one after
    // the other's would wait each time.
    constexpr int kAtOnce = T::kWgmma ? 4 : 1;
#pragma unroll
    for (int first = 0; first < T::kQkRowTiles; first += kAtOnce) {
      float factor[kAtOnce][2], reference[kAtOnce][2];
      uint32_t packed[kAtOnce][T::kQkBlocks][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        load_row_state(first + i, factor[i], reference[i]);
        adjust(first + i, reference[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int b = 0; b < T::kQkBlocks; ++b) {
          const int n = first + i;
          float p[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float x = ptx::fma(score_[b][n][c], factor[i][c & 1], -reference[i][c & 1]);
            exceeds |= x > kSlack;
            p[c] = ptx::exp2(x);
            sum[n][c & 1] += p[c];
          }
          packed[i][b][0] = ptx::pack_f16x2(p[0], p[1]);
          packed[i][b][1] = ptx::pack_f16x2(p[2], p[3]);
        }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int b = 0; b < T::kQkBlocks; ++b) store_p(slot, b, first + i, packed[i][b]);
    }
    keep_sums(sum);
    return exceeds;
  }

  // Moves the references up to the rows' maxima, for all warps alike, and rewrites P.
  MLA_DEVICE void raise_reference(int slot) {
    store_maxima();
    ptx::sync_block();
    float all_raised[T::kWgmma ? T::kRowTiles : 1][2];
#pragma unroll
    for (int n = 0; n < T::kRowTiles; ++n) {
      float (&raised)[2] = all_raised[T::kWgmma ? n : 0];
      float shrink[2];
      raise<T::kTokenGroups>(n, 0, raised, shrink);
#pragma unroll
      for (int d = 0; d < T::kDimBlocks; ++d)
#pragma unroll
        for (int c = 0; c < 4; ++c) out_[d][n][c] *= shrink[c & 1];
      if constexpr (T::kWgmma) {
        if (n == sum_row_tile()) {
#pragma unroll
          for (int c = 0; c < 2; ++c) sum_[0][c] *= shrink[c];
        }
      } else {
#pragma unroll
        for (int own = 0; own < T::kQkRowTiles; ++own) {
          if (n == row_group_ * T::kQkRowTiles + own) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              reference_[own][c] = raised[c];
              sum_[own][c] *= shrink[c];
            }
          }
        }
      }
    }
    const auto own = [&](int n, float (&reference)[2]) {
      const auto& raised = T::kWgmma ? all_raised[T::kWgmma ? n : 0] : reference_[n];
      reference[0] = raised[0];
      reference[1] = raised[1];
    };
    softmax(slot, own);
    if constexpr (T::kWgmma) ptx::publish_to_wgmma();
    ptx::sync_block();
    // Everyone has read the old references: write the new ones for the next time.
    if (token_group_ == 0 && g_ == 0) {
#pragma unroll
      for (int n = 0; n < T::kQkRowTiles; ++n) {
        float reference[2];
        own(n, reference);
#pragma unroll
        for (int c = 0; c < 2; ++c) ptx::st_shared(row_state(qk_row(n, c)) + 4, reference[c]);
      }
    }
  }

  // The same of one warpgroup's half of a staggered tile, for its warps alone. What it shrinks by
  // is left to both warpgroups.
  MLA_DEVICE void raise_reference_of_half(int slot) {
    const int half = warp_ / 4;
    store_maxima();
    ptx::sync_at<128>(kOwnBarrier + half);
    float raised[T::kRowTiles][2];
#pragma unroll
    for (int n = 0; n < T::kRowTiles; ++n) {
      float shrink[2];
      raise<4>(n, 4 * half, raised[n], shrink);
      if (warp_ % 4 == 0 && g_ == 0) {
        ptx::st_shared(shrink_address(half, 8 * n + 2 * t_),
                       ptx::U2{ptx::as_bits(shrink[0]), ptx::as_bits(shrink[1])});
      }
    }
    ptx::sync_at<128>(kOwnBarrier + half);  // all have read the maxima and the old references
    softmax(slot, [&](int n, float (&reference)[2]) {
      reference[0] = raised[n][0];
      reference[1] = raised[n][1];
    });
    ptx::publish_to_wgmma();
    ptx::sync_at<128>(kOwnBarrier + half);
    if (warp_ % 4 == 0 && g_ == 0) {
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) ptx::st_shared(row_state(qk_row(n, c)) + 4, raised[n][c]);
    }
  }

  // Says whether the half moved the references.
  MLA_DEVICE void note_raise(int half, bool raised) const {
    if (ptx::thread_index() % 128 == 0) {
      ptx::st_shared(shrink_address(half, T::kRows), static_cast<uint32_t>(raised));
    }
  }
  MLA_DEVICE bool raised_by(int half) const {
    uint32_t raised;
    ptx::ld_shared(raised, shrink_address(half, T::kRows));
    return raised != 0;
  }
  // What came before the half, in the units of its references.
  MLA_DEVICE void shrink(int half) {
#pragma unroll
    for (int n = 0; n < T::kRowTiles; ++n) {
      ptx::U2 v;
      ptx::ld_shared(v, shrink_address(half, 8 * n + 2 * t_));
      const float by[2] = {ptx::as_float(v.x), ptx::as_float(v.y)};
#pragma unroll
      for (int d = 0; d < T::kDimBlocks; ++d)
#pragma unroll
        for (int c = 0; c < 4; ++c) out_[d][n][c] *= by[c & 1];
      if (n == sum_row_tile()) {
        sum_[0][0] *= by[0];
        sum_[0][1] *= by[1];
      }
    }
  }

  // Barriers of two warpgroups, the first of each pair for half 0: a half's own warps; its P is
  // there; the other half's warps are done with it.
  static constexpr int kOwnBarrier = 1, kReadyBarrier = 3, kDoneBarrier = 5;

  MLA_DEVICE void add_sums() {
#pragma unroll
    for (int n = 0; n < kSumRowTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[n][c] += p_sum_[n][c];
  }

  // O^T += V^T P^T over the tile, for this warp's dims.
  MLA_DEVICE void output(int slot) {
    if constexpr (T::kGroupScales) raise_exponent(slot);
    const uint32_t tile = tile_address(slot) + warp_ * T::kWarpDims;
    const uint32_t p = shared_ + T::kPOffset + (lane_ & 15) * T::kPRowBytes;
#pragma unroll
    for (int k = 0; k < (MLA_FP8KV_LOADS_ONLY ? 0 : T::kTokenBlocks); ++k) {
      uint32_t pt[T::kRowTiles][2];
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n) {
        ptx::ldmatrix_x2_trans(pt[n], p + k * 16 * T::kPRowBytes + p_chunk(lane_ & 7, n));
      }
      if constexpr (T::kGroupScales) scale_p(slot, k, pt);
#pragma unroll
      for (int d = 0; d < T::kDimBlocks; d += 2) {
        // Tokens 0..7 and 8..15 of 16 dims, then of the next 16.
        uint32_t word[4], v[2][4];
        ptx::ldmatrix_x4_trans(
            word, tile + ((d & 2) ? odd_ : even_) + (d >> 2) * 64 + k * 16 * T::kKvRowBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Row g of the MMA is dim 2g of the block, row g+8 is dim 2g+1.
          Widen<F, D>::v_word(word[i], v[i >> 1][2 * (i & 1)], v[i >> 1][2 * (i & 1) + 1]);
        }
#pragma unroll
        for (int n = 0; n < T::kRowTiles; ++n) {
          ptx::mma_m16n8k16_f16(out_[d][n], v[0], pt[n][0], pt[n][1]);
          ptx::mma_m16n8k16_f16(out_[d + 1][n], v[1], pt[n][0], pt[n][1]);
        }
      }
    }
  }

  // The same with wgmma, for half `half` of a staggered tile, in groups of 16 tokens and 64 of this
  // warp's dims.
  static constexpr int kPvParts = T::kDimBlocks / 4, kPvBlocks = 4;
  static constexpr int kPvGroups = kPvBlocks * kPvParts;
  MLA_DEVICE void output_wgmma(int slot, int half) {
    if constexpr (MLA_FP8KV_LOADS_ONLY) return;
    const uint32_t tile = tile_address(slot) + half * kPvBlocks * 16 * T::kKvRowBytes;
    const uint32_t p_16 = p_cores(slot, half * kPvBlocks, 0) >> 4;
    const uint32_t k_stride = p_cores(slot, 0, 1) - p_cores(slot, 0, 0);
    uint32_t word[2][4];  // each: tokens 0..7 and 8..15 of 16 dims, then of the next 16
    const uint32_t even = late(even_);
    uint32_t v[2][4][4];  // four blocks of dims in use by the tensor core, four in the making
    const auto fetch = [&](int i) {
      const uint32_t at = tile + i / kPvParts * 16 * T::kKvRowBytes;
      const int dims = warp_ * kPvParts + i % kPvParts;
      ptx::ldmatrix_x4_trans(word[0], at + at_64_dims(even, dims));
      ptx::ldmatrix_x4_trans(word[1], at + at_64_dims(even ^ 2 * kChunkBytes, dims));
    };
    const auto widen = [&](uint32_t (&to)[4][4]) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // Row g of the MMA is dim 2g of the block, row g+8 is dim 2g+1.
          uint32_t (&block)[4] = to[2 * i + (j >> 1)];
          Widen<F, D>::v_word(word[i][j], block[2 * (j & 1)], block[2 * (j & 1) + 1]);
        }
    };
    fetch(0);
    widen(v[0]);
#pragma unroll
    for (int i = 0; i < kPvGroups; ++i) {
      if (i + 1 < kPvGroups) fetch(i + 1);
      const int k = i / kPvParts, first = i % kPvParts * 4;
      ptx::wgmma_begin();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        ptx::wgmma<true>(out_[first + d], v[i & 1][d],
                         ptx::wgmma_matrix(p_16 + k * (p_cores(0, 1, 0) - p_cores(0, 0, 0)) / 16,
                                           k_stride, kCoreBytes));
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (i + 1 < kPvGroups) widen(v[(i + 1) & 1]);
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int d = 0; d < T::kDimBlocks; ++d) ptx::wgmma_result(out_[d]);
  }

  // ---- the end of a work item

  // Writes the item's rows: to `out` and `lse` if it saw all their KV, else to its partial slot.
  MLA_DEVICE void finish(const WorkItem& item) {
    store_sums();
    ptx::sync_block();
    if constexpr (T::kWgmma) {
      // What all threads do here once, for many rows, should be little code: it is slow to fetch.
      const int row = late(ptx::thread_index());
      if (row < T::kRows) ptx::st_shared(row_end_address(row), row_end(item, row).cell());
      ptx::sync_block();
      if (p_.q_is_bf16 && item.partial < 0) {
        store_rows<true>();
      } else {
        store_rows<false>();
      }
    } else {
      float unit = Widen<F, D>::kScale;
      if constexpr (T::kGroupScales)
        unit *= ptx::as_float(static_cast<uint32_t>(out_exponent_ + 127) << 23);
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = 8 * n + 2 * t_ + c;
          if (row >= item.rows) continue;
          const float sum = row_sum(row);
          const float scale = sum == 0.f ? 0.f : ptx::divide(unit, sum);
          if (item.partial < 0) {
            store_out(item, row, n, c, scale * p_.out_scale);
          } else {
            store_partial(item, row, n, c, scale);
          }
        }
    }
    // One thread a row writes its statistics.
    const int row = ptx::thread_index();
    if (row < item.rows) {
      ptx::U2 state;
      ptx::ld_shared(state, row_state(row));
      const float reference = ptx::as_float(state.y), sum = row_sum(row);
      if (item.partial >= 0) {
        float* stat = p_.partial_stat + (int64_t{item.partial} * T::kRows + row) * 2;
        ptx::st_global(reinterpret_cast<ptx::U2*>(stat),
                       ptx::U2{ptx::as_bits(reference), ptx::as_bits(sum)});
      } else if (p_.lse != nullptr) {
        const float lse = sum == 0.f ? kMasked : reference + ptx::log2(sum);
        ptx::st_global(p_.lse + (int64_t{item.q_begin} * p_.heads.value + item.row_begin + row),
                       lse * p_.lse_scale);
      }
    }
    ptx::sync_block();
  }

 private:
  static constexpr int kNoExponent = -126;

  // v, in a way that keeps the compiler from computing what depends on it before the loops: beside
  // wgmma's registers that would spill.
  static MLA_DEVICE int late(int v) { return T::kWgmma ? ptx::not_hoisted(v) : v; }

  template <class Array>
  static MLA_DEVICE void zero(Array& a) {
    float* f = reinterpret_cast<float*>(&a);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Array) / sizeof(float)); ++i) f[i] = 0.f;
  }

  template <class Array>
  static MLA_DEVICE void scale_all(Array& a, float scale) {
    float* f = reinterpret_cast<float*>(&a);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Array) / sizeof(float)); ++i) f[i] *= scale;
  }

  // ---- addresses
  // Known to the compiler, so that no piece has two loads to choose from: the second would wait for
  // the first (measured: 8 heads: 1.6 us more for a request of 500 tokens).
  static MLA_DEVICE constexpr bool is_pe(int i) {
    return i * T::kWarpsPerRowTile >= T::kCkvSteps / 2;
  }
  // The row tile a warp stages, and which of the warps that share it that is.
  MLA_DEVICE int q_row_tile() const {
    return T::kWarpsPerRowTile == 1 ? warp_ : warp_ % T::kRowTiles;
  }
  MLA_DEVICE int q_part() const { return T::kWarpsPerRowTile == 1 ? 0 : warp_ / T::kRowTiles; }
  // Pieces are two k-steps each.
  MLA_DEVICE int q_piece(int i) const { return i * T::kWarpsPerRowTile + q_part(); }
  MLA_DEVICE bool has_piece(int i) const {
    constexpr int kPieces = T::kQkSteps / 2;
    return (i + 1) * T::kWarpsPerRowTile <= kPieces || q_piece(i) < kPieces;
  }
  // Fragments of two row tiles of a k-step lie together (of two k-steps, where there is one row
  // tile only), so that one 16-byte load brings both.
  MLA_DEVICE uint32_t q_address(int step, int row_tile, int lane) const {
    const int pair = T::kRowTiles == 1 ? step >> 1 : step * (T::kRowTiles / 2) + (row_tile >> 1);
    const int half = T::kRowTiles == 1 ? step & 1 : row_tile & 1;
    return shared_ + T::kQOffset + (pair * 32 + lane) * 16 + half * 8;
  }
  // even_ or odd_, in the 64 dims `i` of a row.
  static MLA_DEVICE uint32_t at_64_dims(uint32_t at, int i) {
    return T::kStaggered ? (at ^ (i & 1) * 64) + (i >> 1) * 128 : at + i * 64;
  }
  // The tile in `slot`.
  MLA_DEVICE uint32_t tile_address(int slot) const {
    return shared_ + T::kRingOffset + slot * T::kSlotBytes;
  }
  // Row tile n of P in the row of a token: swizzled, so that 8 tokens of one row tile lie in 8
  // different chunks of banks.
  static MLA_DEVICE uint32_t p_chunk(int token, int n) {
    return 16 * (n ^ ((token & 7) * T::kRowTiles / 8));
  }
  MLA_DEVICE int qk_row(int n, int c) const {
    return 8 * (row_group_ * T::kQkRowTiles + n) + 2 * t_ + c;
  }
  MLA_DEVICE int qk_token(int b) const { return 16 * (token_group_ * T::kQkBlocks + b) + g_; }
  // Floats [rows][token groups]; staggered, those of each half in the place of its P.
  static MLA_DEVICE uint32_t row_cell(int token_group, int row) {
    if constexpr (T::kStaggered) {
      return token_group / 4 * kCellStride + 4 * (row * 4 + token_group % 4);
    }
    return 4 * (row * T::kTokenGroups + token_group);
  }
  MLA_DEVICE uint32_t shrink_address(int half, int row) const {
    return shared_ + T::kShrinkOffset + half * T::kShrinkBytes + 4 * row;
  }
  MLA_DEVICE uint32_t tile_max_address(int token_group, int row) const {
    return shared_ + T::kTileMaxOffset + row_cell(token_group, row);
  }
  MLA_DEVICE uint32_t sum_address(int token_group, int row) const {
    return shared_ + T::kSumOffset + row_cell(token_group, row);
  }
  MLA_DEVICE float row_sum(int row) const {
    float x[T::kTokenGroups], sum = 0.f;
    read_cells(sum_address(0, row), x, kCellStride);
#pragma unroll
    for (int k = 0; k < T::kTokenGroups; ++k) sum += x[k];
    return sum;
  }
  static constexpr int kCellStride = T::kStaggered ? T::kPBytes / 2 : 16;  // of four
  template <int N>
  static MLA_DEVICE void read_cells(uint32_t address, float (&x)[N], int stride = 16) {
    static_assert(N == 2 || N % 4 == 0, "read in pieces of 8 or 16 bytes");
    if constexpr (N == 2) {
      ptx::U2 v;
      ptx::ld_shared(v, address);
      x[0] = ptx::as_float(v.x);
      x[1] = ptx::as_float(v.y);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        ptx::U4 v;
        ptx::ld_shared(v, address + i / 4 * stride);
        x[i] = ptx::as_float(v.x);
        x[i + 1] = ptx::as_float(v.y);
        x[i + 2] = ptx::as_float(v.z);
        x[i + 3] = ptx::as_float(v.w);
      }
    }
  }

  // ---- Q
  // The power of two that brings the largest element of this thread's row into [2^14, 2^15), and
  // its inverse. Clamped so that both are normal floats.
  MLA_DEVICE float q_scale(float& scale_down) const {
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < T::kQPieces; ++i) {
      for (const uint32_t x : {q_[i].x, q_[i].y, q_[i].z, q_[i].w}) {
        pair = ptx::max_bf16x2(pair, x & 0x7fff7fffu);
      }
    }
    pair = ptx::max_bf16x2(pair, ptx::shuffle_xor(pair, 1));
    pair = ptx::max_bf16x2(pair, ptx::shuffle_xor(pair, 2));
    float largest = ptx::max(ptx::as_float(pair << 16), ptx::as_float(pair & 0xffff0000u));
    if constexpr (T::kWarpsPerRowTile > 1) {  // the row is spread over warps
      const uint32_t cells =
          shared_ + T::kQMaxOffset + (8 * q_row_tile() + g_) * T::kWarpsPerRowTile * 4;
      if (t_ == 0) ptx::st_shared(cells + q_part() * 4, largest);
      ptx::sync_block();
      float x[T::kWarpsPerRowTile];
      read_cells(cells, x);
#pragma unroll
      for (int i = 0; i < T::kWarpsPerRowTile; ++i) largest = ptx::max(largest, x[i]);
    }
    const int exponent = static_cast<int>((ptx::as_bits(largest) >> 23) & 0xff) - 127;
    const int up = 14 - exponent < 126 ? 14 - exponent : 126;
    scale_down = ptx::as_float(static_cast<uint32_t>(127 - up) << 23);
    return ptx::as_float(static_cast<uint32_t>(up + 127) << 23);
  }

  // Q and P for wgmma: cores of 8 k x 8 rows, those of all row tiles together.
  static constexpr int kCoreBytes = 128, kCoreRow = T::kRowTiles * kCoreBytes;
  // P of half `half` of the 16 tokens `block`.
  MLA_DEVICE uint32_t p_cores(int slot, int block, int half) const {
    if constexpr (T::kStaggered) {
      return block * kCoreRow +
             (half == 0 ? tile_address(slot) + T::kTokens * kCkvDim : shared_ + T::kPOffset);
    }
    return shared_ + T::kPOffset + (2 * block + half) * kCoreRow;
  }
  // Four neighbouring elements of Q as lane t's fragment of a k-step.
  static MLA_DEVICE ptx::U2 bf16_fragment(uint32_t a, uint32_t b, float scale) {
    const float x[4] = {ptx::as_float(a << 16) * scale, ptx::as_float(a & 0xffff0000u) * scale,
                        ptx::as_float(b << 16) * scale, ptx::as_float(b & 0xffff0000u) * scale};
    constexpr bool kAlternate = Widen<F, D>::kAlternatePairs;
    return {ptx::pack_f16x2(x[0], x[kAlternate ? 2 : 1]),
            ptx::pack_f16x2(x[kAlternate ? 1 : 2], x[3])};
  }
  static MLA_DEVICE ptx::U2 f16_fragment(uint32_t a, uint32_t b) {
    if constexpr (!Widen<F, D>::kAlternatePairs) return {a, b};
    return {ptx::byte_permute(a, b, 0x5410), ptx::byte_permute(a, b, 0x7632)};
  }
  // This thread's elements of piece i, which are the fragments of lanes t and t + 1, t even.
  MLA_DEVICE void store_q(int i, ptx::U2 first, ptx::U2 second) const {
    if (!has_piece(i)) return;
    const int step = 2 * q_piece(i) + (t_ >> 1), row_tile = q_row_tile();
    const int lane = 4 * g_ + 2 * (t_ & 1);
    if constexpr (T::kWgmma) {
      const uint32_t a =
          shared_ + T::kQOffset + 2 * step * kCoreRow + row_tile * kCoreBytes + 4 * lane;
      ptx::st_shared(a, ptx::U2{first.x, second.x});
      ptx::st_shared(a + kCoreRow, ptx::U2{first.y, second.y});
    } else {
      // The lanes of the two k-steps in different order, for the banks.
      const bool turn = t_ & 2;
      const uint32_t a = q_address(step, row_tile, lane);
      ptx::st_shared(a + (turn ? 16 : 0), turn ? second : first);
      ptx::st_shared(a + (turn ? 0 : 16), turn ? first : second);
    }
  }

  // b fragments of two k-steps and all row tiles of this warp.
  MLA_DEVICE void load_q_fragments(int pair, uint32_t (&q)[2][T::kQkRowTiles][2]) const {
    ptx::U4 v;
    if constexpr (T::kQkRowTiles == 1) {
      ptx::ld_shared(v, q_address(2 * pair, 0, lane_));
      q[0][0][0] = v.x;
      q[0][0][1] = v.y;
      q[1][0][0] = v.z;
      q[1][0][1] = v.w;
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < T::kQkRowTiles; n += 2) {
          ptx::ld_shared(v, q_address(2 * pair + half, row_group_ * T::kQkRowTiles + n, lane_));
          q[half][n][0] = v.x;
          q[half][n][1] = v.y;
          q[half][n + 1][0] = v.z;
          q[half][n + 1][1] = v.w;
        }
    }
  }

  // ---- NaN codes that the conversion hides: NaN scores of the token's rows poison the rows' whole
  // output
  MLA_DEVICE void poison(const NanFinder (&nan)[2], float (&score)[T::kQkRowTiles][4]) const {
    uint32_t found = (nan[0].found() ? 1u : 0u) | (nan[1].found() ? 2u : 0u);
    if (!ptx::any(found != 0)) return;
    found |= ptx::shuffle_xor(found, 1);
    found |= ptx::shuffle_xor(found, 2);
#pragma unroll
    for (int n = 0; n < T::kQkRowTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (found & (c < 2 ? 1u : 2u)) score[n][c] = __builtin_nanf("");
      }
  }

  // ---- P
  // The maxima of the rows over this warp's tokens, as logits.
  MLA_DEVICE void store_maxima() const {
#pragma unroll
    for (int n = 0; n < T::kQkRowTiles; ++n) {
      float factor[2], reference[2];
      load_row_state(n, factor, reference);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = kMasked;
#pragma unroll
        for (int b = 0; b < T::kQkBlocks; ++b) {
          x = ptx::max(x, ptx::max(score_[b][n][c], score_[b][n][c + 2]));
        }
        x = ptx::max(x, ptx::shuffle_xor(x, 4));
        x = ptx::max(x, ptx::shuffle_xor(x, 8));
        x = ptx::max(x, ptx::shuffle_xor(x, 16));
        if (g_ == 0) {
          ptx::st_shared(tile_max_address(token_group_, qk_row(n, c)), x * factor[c]);
        }
      }
    }
  }
  // References of two rows moved up to the maxima of `Groups` token groups, and what that divides
  // P by.
  template <int Groups>
  MLA_DEVICE void raise(int n, int first_group, float (&raised)[2], float (&shrink)[2]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + 2 * t_ + c;
      float old, x[Groups];
      ptx::ld_shared(old, row_state(row) + 4);
      read_cells(tile_max_address(first_group, row), x);
      raised[c] = old;
#pragma unroll
      for (int k = 0; k < Groups; ++k) raised[c] = ptx::max(raised[c], x[k]);
      shrink[c] = raised[c] == old ? 1.f : ptx::exp2(old - raised[c]);
    }
  }
  // The sums of the tile's P, until it is known to stand. With wgmma, over a warp's tokens, a lane
  // those of two rows, to save registers; else over each thread's own.
  MLA_DEVICE void keep_sums(float (&sum)[T::kQkRowTiles][2]) {
    int tiles = T::kQkRowTiles;
    if constexpr (T::kWgmma) {
#pragma unroll
      for (int mask = 16; mask >= 4; mask /= 2) {
        tiles = tiles > 1 ? tiles / 2 : 0;
#pragma unroll
        for (int n = 0; n < (tiles > 0 ? tiles : 1); ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float lower = sum[n][c], upper = sum[n + tiles][c];
            const bool up = (lane_ & mask) != 0 && tiles > 0;
            sum[n][c] = (up ? upper : lower) + ptx::shuffle_xor(up ? lower : upper, mask);
          }
        if (tiles == 0) tiles = 1;
      }
    }
#pragma unroll
    for (int n = 0; n < kSumRowTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) p_sum_[n][c] = sum[n][c];
  }
  // Whose sums this lane has.
  MLA_DEVICE int sum_row_tile() const { return g_ / (8 / T::kQkRowTiles); }

  // The factors and references of two rows. They stay in shared memory where wgmma needs the
  // registers.
  MLA_DEVICE void load_row_state(int n, float (&factor)[2], float (&reference)[2]) const {
    if constexpr (T::kWgmma) {
      read_row_state(n, factor, reference);
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        factor[c] = factor_[n][c];
        reference[c] = reference_[n][c];
      }
    }
  }
  MLA_DEVICE void read_row_state(int n, float (&factor)[2], float (&reference)[2]) const {
    ptx::U4 v;
    ptx::ld_shared(v, row_state(qk_row(n, 0)));
    factor[0] = ptx::as_float(v.x);
    reference[0] = ptx::as_float(v.y);
    factor[1] = ptx::as_float(v.z);
    reference[1] = ptx::as_float(v.w);
  }
  MLA_DEVICE uint32_t row_state(int row) const { return shared_ + T::kRowStateOffset + 8 * row; }

  MLA_DEVICE void store_p(int slot, int b, int n, const uint32_t (&p)[2]) const {
    if constexpr (T::kWgmma) {
      const uint32_t core = n * kCoreBytes + 4 * lane_;
      ptx::st_shared(p_cores(slot, token_group_, 0) + core, p[0]);
      ptx::st_shared(p_cores(slot, token_group_, 1) + core, p[1]);
      return;
    }
    const uint32_t a = shared_ + T::kPOffset + qk_token(b) * T::kPRowBytes +
                       p_chunk(g_, row_group_ * T::kQkRowTiles + n) + 4 * t_;
    ptx::st_shared(a, p[0]);
    ptx::st_shared(a + 8 * T::kPRowBytes, p[1]);
  }

  // ---- group scales: row token of S^T, k index of the second product
  MLA_DEVICE float group_scale(int slot, int token, int group) const {
    float x;
    ptx::ld_shared(x, shared_ + T::kScaleRingOffset + slot * T::kScaleSlotBytes +
                          4 * (token * kScaleGroups + group));
    return x;
  }

  template <class Acc>
  MLA_DEVICE void move_to_scores(Acc& acc) {
#pragma unroll
    for (int b = 0; b < T::kQkBlocks; ++b)
#pragma unroll
      for (int n = 0; n < T::kQkRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) score_[b][n][c] = acc[b][n][0][c];
    zero(acc);
  }

  template <class Acc>
  MLA_DEVICE void add_scaled_group(int slot, int group, Acc& acc) {
#pragma unroll
    for (int b = 0; b < T::kQkBlocks; ++b) {
      const float lower = group_scale(slot, qk_token(b), group);
      const float upper = group_scale(slot, qk_token(b) + 8, group);
#pragma unroll
      for (int n = 0; n < T::kQkRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          score_[b][n][c] = ptx::fma(acc[b][n][0][c], c < 2 ? lower : upper, score_[b][n][c]);
          acc[b][n][0][c] = 0.f;
        }
    }
  }

  MLA_DEVICE int own_group() const { return warp_ * T::kWarpDims / kScaleGroupDims; }

  // P x scale must fit FP16: O is kept in units of 2^out_exponent_, the largest power of two of the
  // scales seen.
  MLA_DEVICE void raise_exponent(int slot) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < T::kTokens; i += 32) {
      largest = ptx::max(largest, __builtin_fabsf(group_scale(slot, i + lane_, own_group())));
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) largest = ptx::max(largest, ptx::shuffle_xor(largest, i));
    int exponent = static_cast<int>((ptx::as_bits(largest) >> 23) & 0xff) - 127;
    exponent = exponent < kNoExponent ? kNoExponent : exponent > 126 ? 126 : exponent;
    if (exponent > out_exponent_) {
      const int down = exponent - out_exponent_;
      const float shrink =
          down > 126 ? 0.f : ptx::as_float(static_cast<uint32_t>(127 - down) << 23);
#pragma unroll
      for (int d = 0; d < T::kDimBlocks; ++d)
#pragma unroll
        for (int n = 0; n < T::kRowTiles; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) out_[d][n][c] *= shrink;
      out_exponent_ = exponent;
    }
  }

  MLA_DEVICE void scale_p(int slot, int k, uint32_t (&pt)[T::kRowTiles][2]) const {
    const float unit = ptx::as_float(static_cast<uint32_t>(127 - out_exponent_) << 23);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 16 * k + 8 * half + 2 * t_;
      const float lower = unit * group_scale(slot, token, own_group());
      const float upper = unit * group_scale(slot, token + 1, own_group());
#pragma unroll
      for (int n = 0; n < T::kRowTiles; ++n) {
        float lo, hi;
        ptx::unpack_f16x2(pt[n][half], lo, hi);
        pt[n][half] = ptx::pack_f16x2(lo * lower, hi * upper);
      }
    }
  }

  // ---- results
  MLA_DEVICE void store_sums() const {
    if constexpr (T::kWgmma) {
      const int lane = late(lane_);
      constexpr int kLanes = 32 / T::kQkRowTiles;  // of one row tile
      if (lane % kLanes < 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = lane / kLanes * 8 + 2 * (lane & 3) + c;
          ptx::st_shared(sum_address(token_group_, row), sum_[0][c]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < T::kQkRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float x = sum_[n][c];
          x += ptx::shuffle_xor(x, 4);
          x += ptx::shuffle_xor(x, 8);
          x += ptx::shuffle_xor(x, 16);
          if (g_ == 0) ptx::st_shared(sum_address(token_group_, qk_row(n, c)), x);
        }
    }
  }

  // Where a row goes (nullptr: nowhere), and what it is multiplied by, in the place of Q.
  struct RowEnd {
    uint16_t* to;
    float scale;
    MLA_DEVICE ptx::U4 cell() const {
      const auto address = reinterpret_cast<uint64_t>(to);
      return {static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32),
              ptx::as_bits(scale), 0};
    }
    static MLA_DEVICE RowEnd of(const ptx::U4& cell) {
      return {reinterpret_cast<uint16_t*>(uint64_t{cell.y} << 32 | cell.x), ptx::as_float(cell.z)};
    }
  };
  MLA_DEVICE uint32_t row_end_address(int row) const { return shared_ + T::kQOffset + 16 * row; }

  MLA_DEVICE RowEnd row_end(const WorkItem& item, int row) const {
    if (row >= item.rows) return {};
    const float sum = row_sum(row);
    const float scale = sum == 0.f ? 0.f : ptx::divide(Widen<F, D>::kScale, sum);
    if (item.partial >= 0) {
      return {static_cast<uint16_t*>(p_.partial_out) +
                  (int64_t{item.partial} * T::kRows + row) * kCkvDim,
              scale};
    }
    return {p_.out + row_offset(p_, item.q_begin, item.row_begin + row, p_.out_token_stride,
                                p_.out_head_stride),
            scale * p_.out_scale};
  }

  template <bool Bf16>
  MLA_DEVICE void store_rows() const {
    const int first = warp_ * T::kWarpDims + 2 * late(g_);
#pragma unroll
    for (int n = 0; n < T::kRowTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        ptx::U4 cell;
        ptx::ld_shared(cell, row_end_address(8 * n + 2 * t_ + c));
        const RowEnd end = RowEnd::of(cell);
        if (end.to == nullptr) continue;
#pragma unroll
        for (int d = 0; d < T::kDimBlocks; ++d) {
          const float lo = out_[d][n][c] * end.scale, hi = out_[d][n][c + 2] * end.scale;
          ptx::st_global(reinterpret_cast<uint32_t*>(end.to + first + 16 * d),
                         Bf16 ? ptx::pack_bf16x2(lo, hi) : ptx::pack_f16x2(lo, hi));
        }
      }
  }

  MLA_DEVICE void store_out(const WorkItem& item, int row, int n, int c, float scale) const {
    uint16_t* out =
        p_.out + warp_ * T::kWarpDims + 2 * g_ +
        row_offset(p_, item.q_begin, item.row_begin + row, p_.out_token_stride, p_.out_head_stride);
#pragma unroll
    for (int d = 0; d < T::kDimBlocks; ++d) {
      const float lo = out_[d][n][c] * scale, hi = out_[d][n][c + 2] * scale;
      ptx::st_global(reinterpret_cast<uint32_t*>(out + 16 * d),
                     p_.q_is_bf16 ? ptx::pack_bf16x2(lo, hi) : ptx::pack_f16x2(lo, hi));
    }
  }

  MLA_DEVICE void store_partial(const WorkItem& item, int row, int n, int c, float scale) const {
    const int64_t at =
        (int64_t{item.partial} * T::kRows + row) * kCkvDim + warp_ * T::kWarpDims + 2 * g_;
#pragma unroll
    for (int d = 0; d < T::kDimBlocks; ++d) {
      const float lo = out_[d][n][c] * scale, hi = out_[d][n][c + 2] * scale;
      if constexpr (T::kGroupScales) {
        ptx::st_global(
            reinterpret_cast<ptx::U2*>(static_cast<float*>(p_.partial_out) + at + 16 * d),
            ptx::U2{ptx::as_bits(lo), ptx::as_bits(hi)});
      } else {
        ptx::st_global(
            reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p_.partial_out) + at + 16 * d),
            ptx::pack_f16x2(lo, hi));
      }
    }
  }

  const Params& p_;
  uint32_t shared_;
  int lane_, warp_, g_, t_;
  int token_group_, row_group_;
  uint32_t even_, odd_;  // this lane's ldmatrix row at chunks 0/1 and 2/3 of 16 tokens

  ptx::U4 q_[T::kQPieces];
  float factor_[T::kQkRowTiles][2];     // score units of a row to base-2 logits
  float reference_[T::kQkRowTiles][2];  // the same in all warps of a row group
  float score_[T::kQkBlocks][T::kQkRowTiles][4];
  static constexpr int kSumRowTiles = T::kWgmma ? 1 : T::kQkRowTiles;
  float sum_[kSumRowTiles][2];    // of P (see keep_sums)
  float p_sum_[kSumRowTiles][2];  // the tile's share of sum_
  float out_[T::kDimBlocks][T::kRowTiles][4];
  int out_exponent_;
};

}  // namespace mla_fp8kv
