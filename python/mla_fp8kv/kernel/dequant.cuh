/*
 * FP8 bytes to FP16 operands, in registers.
 *
 * FP16, not BF16: both hold every e4m3 and e5m2 value exactly, the MMA rate is the same, P <= 2^8
 * keeps three more bits, and from SM89 on the hardware converts (measured on H200 with 8 heads,
 * 32 x 8192 tokens: 44.6 us with the hardware conversion, 50.7 us by bit placement).
 *
 * ldmatrix gives a lane four bytes: of K four neighbouring dims of one token, of V (transposed) two
 * neighbouring dims of two neighbouring tokens. Each word becomes two operand registers; which
 * bytes pair up decides the order of the k index, and Q is staged in that order.
 */
#pragma once
#include "ptx.cuh"

namespace mla_fp8kv {

enum class Format { kE4M3, kE5M2 };
// kConvert needs SM89. kPlaceBits works everywhere: moved to FP16's exponent field, e4m3 reads as
// value x 2^-8.
enum class Dequant { kConvert, kPlaceBits };

constexpr uint32_t kSigns = 0x80808080u;  // of four bytes

template <Format F, Dequant D>
struct Widen {
  // Pairs of K bytes: neighbours (0,1)(2,3), or alternate (0,2)(1,3) where that saves a permute.
  static constexpr bool kAlternatePairs = F == Format::kE5M2 || D == Dequant::kPlaceBits;
  // Widened values are the true ones divided by this.
  static constexpr float kScale = F == Format::kE4M3 && D == Dequant::kPlaceBits ? 256.f : 1.f;
  // Bit placement turns e4m3's NaN (0x7f, 0xff) into +-480; someone has to look.
  static constexpr bool kHidesNan = F == Format::kE4M3 && D == Dequant::kPlaceBits;

  // Where bit placement puts all but the sign of e4m3, in two FP16.
  static constexpr uint32_t kMagnitudes = 0x3f803f80u;

  // Bytes (0,2) and (1,3) of the word, each pair as two FP16.
  static MLA_DEVICE void alternate(uint32_t word, uint32_t& p02, uint32_t& p13) {
    if constexpr (F == Format::kE5M2) {
      p02 = ptx::byte_permute(word, 0, 0x2404);
      p13 = word & 0xff00ff00u;
    } else if constexpr (D == Dequant::kPlaceBits) {
      const uint32_t signs = ptx::as_written(word & kSigns);
      p02 = ptx::select_bits(kMagnitudes, word << 7, signs << 8);
      p13 = ptx::select_bits(kMagnitudes, word >> 1, signs);
    } else {
      neighbours(ptx::byte_permute(word, 0, 0x3120), p02, p13);
    }
  }

  // Bytes (0,1) and (2,3).
  static MLA_DEVICE void neighbours(uint32_t word, uint32_t& p01, uint32_t& p23) {
#if MLA_FP8KV_HAS_CVT_E4M3
    ptx::cvt_e4m3x4_f16x2(p01, p23, word);
#else
    p01 = p23 = word;  // not reached: kConvert is not instantiated below SM89
#endif
  }

  static MLA_DEVICE void k_word(uint32_t word, uint32_t& first, uint32_t& second) {
    if constexpr (kAlternatePairs) {
      alternate(word, first, second);
    } else {
      neighbours(word, first, second);
    }
  }

  // first: the lower dim over both tokens, second: the upper dim.
  static MLA_DEVICE void v_word(uint32_t word, uint32_t& first, uint32_t& second) {
    alternate(word, first, second);
  }
};

// Finds NaN codes among words of e4m3 bytes: a byte is NaN if its low seven bits are all ones.
// `signs` of a word are its bits in kSigns, which the caller may share with the conversion.
struct NanFinder {
  uint32_t seen = 0;
  MLA_DEVICE void look(uint32_t word, uint32_t signs) { seen |= word - signs + 0x01010101u; }
  MLA_DEVICE bool found() const { return (seen & kSigns) != 0; }
};

}  // namespace mla_fp8kv
