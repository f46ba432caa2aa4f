// The GPU's small-float conversions, approximate functions and tensor-core product, in portable
// C++.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace mla_fp8kv::host {

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// cvt.rn.f16.f32: nearest even, subnormals kept, overflow to infinity, NaN to 0x7fff.
inline uint16_t f16_from_float(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) {
    // Multiples of 2^-24; adding 0.5 puts the ulp of the sum exactly there, so the addition rounds.
    return static_cast<uint16_t>(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
  }
  const uint32_t exponent_rebased = (bits & 0x7fffffffu) - (112u << 23);
  const uint32_t round = 0xfffu + ((exponent_rebased >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((exponent_rebased + round) >> 13));
}

inline float float_from_f16_slow(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const int mantissa = half & 0x3ff;
  float magnitude;
  if (exponent == 31) {
    magnitude =
        mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
  }
  return half & 0x8000 ? -magnitude : magnitude;
}

inline float float_from_f16(uint16_t half) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (int i = 0; i < (1 << 16); ++i) values[i] = float_from_f16_slow(static_cast<uint16_t>(i));
    return values;
  }();
  return table[half];
}

// cvt.rn.bf16.f32: nearest even, NaN to 0x7fff.
inline uint16_t bf16_from_float(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// cvt.rn.f16.e4m3: exact; the format has no infinity, 0x7f and 0xff are NaN (to 0x7fff).
inline uint16_t f16_from_e4m3(uint8_t byte) {
  const int exponent = (byte >> 3) & 15;
  const int mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return 0x7fff;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(mantissa | 8), exponent - 10);
  return f16_from_float(byte & 0x80 ? -magnitude : magnitude);
}

inline float flush_subnormal(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline float ex2_approx_ftz(float x) { return flush_subnormal(std::exp2(flush_subnormal(x))); }
inline float lg2_approx_ftz(float x) { return std::log2(flush_subnormal(x)); }

// __fdividef: a times an approximate reciprocal that is 0 for 2^126 < |b| < 2^128.
inline float fdividef(float a, float b) {
  if (std::fabs(b) > 0x1p126f && !std::isinf(b) && !std::isnan(b)) {
    return a * std::copysign(0.0f, b);
  }
  return a / b;
}

// The fragments of mma.m16n8k16 as PTX ISA tabulates them. The products are exact, and so is the
// sum but for one rounding to float; hardware may round in other places, so results differ from it
// in the last bits.
inline void mma_m16n8k16_f16(float (&c)[32][4], const uint32_t (&a)[32][4],
                             const uint32_t (&b)[32][2]) {
  float a_tile[16][16], b_tile[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, in_group = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const auto value = [half](uint32_t pair) {
        return float_from_f16(static_cast<uint16_t>(pair >> (16 * half)));
      };
      for (int i = 0; i < 4; ++i) {
        a_tile[group + 8 * (i % 2)][2 * in_group + half + 8 * (i / 2)] = value(a[lane][i]);
      }
      for (int i = 0; i < 2; ++i) b_tile[2 * in_group + half + 8 * i][group] = value(b[lane][i]);
    }
  }
  double sums[16][8];
  for (int m = 0; m < 16; ++m) {
    double sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) sum[n] += static_cast<double>(a_tile[m][k]) * b_tile[k][n];
    }
    for (int n = 0; n < 8; ++n) sums[m][n] = sum[n];
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      c[lane][i] =
          static_cast<float>(c[lane][i] + sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
    }
  }
}

}  // namespace mla_fp8kv::host
