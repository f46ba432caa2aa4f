// kernel/ptx.cuh on the CPU: the same wrappers, executed by a simt.h block with the numbers of
// numerics.h.
//
// kernel/ptx.cuh includes this instead of its own text when MLA_FP8KV_HOST is defined.
// MLA_FP8KV_HAS_CVT_E4M3 is 1 to run what SM89+ compiles to and 0 for older GPUs.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "numerics.h"
#include "simt.h"

#ifndef MLA_FP8KV_HAS_CVT_E4M3
#error "define MLA_FP8KV_HAS_CVT_E4M3 to 0 or 1"
#endif

#define MLA_DEVICE inline __attribute__((always_inline))
#define MLA_KERNEL(threads, min_ctas) inline void

namespace mla_fp8kv::ptx {

namespace h = mla_fp8kv::host;

constexpr uint32_t kFullMask = 0xffffffffu;

inline void trap() { h::current->abort("trap"); }

// ---- where am I
MLA_DEVICE int thread_index() { return h::current->thread(); }
MLA_DEVICE int warp_index() { return h::current->thread() / h::kLanes; }
MLA_DEVICE int block_index() { return h::current->block_x(); }
MLA_DEVICE int block_index_y() { return h::current->block_y(); }
MLA_DEVICE int grid_size() { return h::current->launch().grid_x; }
MLA_DEVICE int grid_size_y() { return h::current->launch().grid_y; }
MLA_DEVICE uint32_t shared_base() { return h::kSharedBase; }

// ---- global memory
struct alignas(8) U2 {
  uint32_t x, y;
};
struct alignas(16) U4 {
  uint32_t x, y, z, w;
};

MLA_DEVICE const uint8_t* advance(const uint8_t* base, uint32_t chunks) {
  return base + static_cast<uint64_t>(chunks) * 16;
}

inline void prefetch(const void*) {}

template <class T>
T load_global(const char* op, const T* p) {
  h::current->read_global(op, p, sizeof(T));
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
MLA_DEVICE T ld_const(const T* p) {
  return load_global("ld_const", p);
}
template <class T>
MLA_DEVICE T ld_fresh(const T* p) {
  return load_global("ld_fresh", p);
}
template <class T>
void st_global(T* p, T v) {
  h::current->write_global("st_global", p, sizeof v);
  std::memcpy(p, &v, sizeof v);
}

// ---- global -> shared, asynchronous
__attribute__((noinline)) inline void copy(uint32_t dst, const void* src, uint32_t bytes) {
  h::current->count_lane("cp.async", __builtin_return_address(0), dst, bytes);
  h::current->issue_copy("cp.async", dst, src, bytes);
}
MLA_DEVICE void cp_async_4(uint32_t dst, const void* src) { copy(dst, src, 4); }
MLA_DEVICE void cp_async_16(uint32_t dst, const void* src) { copy(dst, src, 16); }
MLA_DEVICE void cp_async_16_or_zero(uint32_t dst, const void* src, bool valid) {
  copy(dst, valid ? src : nullptr, 16);
}
MLA_DEVICE void cp_async_commit() { h::current->commit_copies(); }
template <int Pending>
MLA_DEVICE void cp_async_wait() {
  h::current->wait_copies(Pending);
}

// ---- shared memory
template <class T>
__attribute__((noinline)) void ld_shared(T& v, uint32_t a) {
  h::current->count_lane("ld.shared", __builtin_return_address(0), a, sizeof v);
  std::memcpy(&v, h::current->shared.read("ld.shared", a, sizeof v, thread_index()), sizeof v);
}
template <class T>
__attribute__((noinline)) void st_shared(uint32_t a, T v) {
  h::current->count_lane("st.shared", __builtin_return_address(0), a, sizeof v);
  std::memcpy(h::current->shared.write("st.shared", a, sizeof v, thread_index()), &v, sizeof v);
}

// ---- ldmatrix
struct MatrixLoad {
  uint32_t row;
  uint32_t* r;
};
template <int Matrices, bool Transposed>
void load_matrices(h::Block& block, MatrixLoad* const* lanes, int first) {
  constexpr const char* op = Transposed ? "ldmatrix.trans" : "ldmatrix";
  for (int j = 0; j < Matrices; ++j) {
    uint16_t matrix[8][8];
    h::WarpAccess access{op, 16, 0xff, {}};
    for (int i = 0; i < 8; ++i) {
      access.addresses[i] = lanes[8 * j + i]->row;
      std::memcpy(matrix[i], block.shared.read(op, lanes[8 * j + i]->row, 16, first + 8 * j + i),
                  16);
    }
    block.count(access);
    for (int lane = 0; lane < h::kLanes; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t low = Transposed ? matrix[2 * t][g] : matrix[g][2 * t];
      const uint32_t high = Transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      lanes[lane]->r[j] = low | high << 16;
    }
  }
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  MatrixLoad load{row, r};
  h::current->collective("ldmatrix.x4", load, &load_matrices<4, false>);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  MatrixLoad load{row, r};
  h::current->collective("ldmatrix.x4.trans", load, &load_matrices<4, true>);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t row) {
  MatrixLoad load{row, r};
  h::current->collective("ldmatrix.x2.trans", load, &load_matrices<2, true>);
}

// ---- tensor core
struct MatrixProduct {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MatrixProduct product{c, a, {b0, b1}};
  h::current->collective<MatrixProduct>(
      "mma", product, [](h::Block&, MatrixProduct* const* lanes, int) {
        float all_c[h::kLanes][4];
        uint32_t all_a[h::kLanes][4], all_b[h::kLanes][2];
        for (int lane = 0; lane < h::kLanes; ++lane) {
          std::memcpy(all_c[lane], lanes[lane]->c, sizeof all_c[lane]);
          std::memcpy(all_a[lane], lanes[lane]->a, sizeof all_a[lane]);
          std::memcpy(all_b[lane], lanes[lane]->b, sizeof all_b[lane]);
        }
        h::mma_m16n8k16_f16(all_c, all_a, all_b);
        for (int lane = 0; lane < h::kLanes; ++lane) {
          std::memcpy(lanes[lane]->c, all_c[lane], sizeof all_c[lane]);
        }
      });
}

// ---- tensor core, four warps at once. A product is executed when its group is waited for, as late
// as it may be: what the kernel does to registers and shared memory in between shows.
#define MLA_FP8KV_HAS_WGMMA 1

MLA_DEVICE uint64_t wgmma_matrix(uint32_t address_16, uint32_t k_stride, uint32_t row_stride) {
  return uint64_t{row_stride >> 4} << 32 | (((k_stride >> 4) << 16) + address_16);
}

// The two fragment registers of row tile n, of matrix `b`, for one lane.
inline void wgmma_fragment(h::Block& block, const h::AsyncProduct& product, int n, int thread,
                           uint32_t (&fragment)[2]) {
  const int g = thread % h::kLanes / 4, t = thread % 4;
  const auto address = static_cast<uint32_t>(product.b & 0x3fff) << 4;
  const auto k_stride = static_cast<uint32_t>(product.b >> 16 & 0x3fff) << 4;
  const auto row_stride = static_cast<uint32_t>(product.b >> 32 & 0x3fff) << 4;
  for (int half = 0; half < 2; ++half) {
    const uint32_t core = address + half * k_stride + n * row_stride;
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int k = 2 * t + i;
      const uint32_t at = core + (product.rows_major ? 16 * k + 2 * g : 16 * g + 2 * k);
      const uint8_t* word = block.shared.read_async("wgmma", at & ~3u, thread);
      std::memcpy(&pair[i], word + (at & 2), 2);
    }
    fragment[half] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

inline void execute_wgmma(h::Block& block, h::AsyncProduct* const* lanes, int first) {
  for (int n = 0; n < lanes[0]->row_tiles; ++n) {
    float c[h::kLanes][4];
    uint32_t a[h::kLanes][4], b[h::kLanes][2];
    for (int lane = 0; lane < h::kLanes; ++lane) {
      const h::AsyncProduct& product = *lanes[lane];
      if (std::memcmp(product.a, product.a_at_issue, sizeof product.a_at_issue) != 0) {
        block.fault("registers of a wgmma changed before it was waited for");
      }
      std::memcpy(a[lane], product.a_at_issue, sizeof a[lane]);
      std::memcpy(c[lane], product.d + 4 * n, sizeof c[lane]);
      wgmma_fragment(block, product, n, first + lane, b[lane]);
    }
    h::mma_m16n8k16_f16(c, a, b);
    for (int lane = 0; lane < h::kLanes; ++lane) {
      std::memcpy(lanes[lane]->d + 4 * n, c[lane], sizeof c[lane]);
    }
  }
}

template <bool RowsMajor, int RowTiles>
void wgmma(float (&d)[RowTiles][4], const uint32_t (&a)[4], uint64_t b) {
  h::AsyncProduct product{&d[0][0], a, {a[0], a[1], a[2], a[3]}, b, RowTiles, RowsMajor};
  h::current->issue_product(product);
}
MLA_DEVICE uint32_t not_hoisted(uint32_t v) { return v; }
inline void wgmma_begin() { h::current->begin_products(); }
inline void wgmma_commit() { h::current->commit_products(); }
template <int Pending>
void wgmma_wait() {
  h::current->wait_products(Pending, &execute_wgmma);
}
template <int RowTiles>
MLA_DEVICE void wgmma_result(float (&)[RowTiles][4]) {}
inline void publish_to_wgmma() { h::current->shared.publish(thread_index()); }

// ---- conversions and arithmetic
#if MLA_FP8KV_HAS_CVT_E4M3
inline void cvt_e4m3x4_f16x2(uint32_t& p01, uint32_t& p23, uint32_t word) {
  static const std::vector<uint16_t> table = [] {
    std::vector<uint16_t> values;
    for (int code = 0; code < 256; ++code) {
      values.push_back(h::f16_from_e4m3(static_cast<uint8_t>(code)));
    }
    return values;
  }();
  p01 = table[word & 0xff] | static_cast<uint32_t>(table[word >> 8 & 0xff]) << 16;
  p23 = table[word >> 16 & 0xff] | static_cast<uint32_t>(table[word >> 24]) << 16;
}
#endif
MLA_DEVICE uint32_t pack_f16x2(float lo, float hi) {
  return h::f16_from_float(lo) | static_cast<uint32_t>(h::f16_from_float(hi)) << 16;
}
MLA_DEVICE uint32_t pack_bf16x2(float lo, float hi) {
  return h::bf16_from_float(lo) | static_cast<uint32_t>(h::bf16_from_float(hi)) << 16;
}
MLA_DEVICE void unpack_f16x2(uint32_t v, float& lo, float& hi) {
  lo = h::float_from_f16(static_cast<uint16_t>(v));
  hi = h::float_from_f16(static_cast<uint16_t>(v >> 16));
}
inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  const auto larger = [](uint32_t x, uint32_t y) {
    const float fx = h::float_of(x), fy = h::float_of(y);
    return std::isnan(fx) ? y : std::isnan(fy) ? x : fx > fy ? x : y;
  };
  return larger(a & 0xffff0000u, b & 0xffff0000u) | larger(a << 16, b << 16) >> 16;
}
MLA_DEVICE float as_float(uint32_t v) { return h::float_of(v); }
MLA_DEVICE uint32_t as_bits(float v) { return h::bits_of(v); }
inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}
MLA_DEVICE uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  return (mask & a) | (~mask & b);
}
MLA_DEVICE uint32_t as_written(uint32_t v) { return v; }
MLA_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
MLA_DEVICE float max(float a, float b) { return std::fmax(a, b); }
MLA_DEVICE float fma(float a, float b, float c) { return std::fma(a, b, c); }
MLA_DEVICE float exp2(float x) { return h::ex2_approx_ftz(x); }
MLA_DEVICE float log2(float x) { return h::lg2_approx_ftz(x); }
MLA_DEVICE float divide(float a, float b) { return h::fdividef(a, b); }

// ---- warp
template <class T>
struct Exchange {
  T value, result;
  int source;
};
template <class T>
T exchange(const char* op, T v, int source) {
  Exchange<T> mine{v, v, source % h::kLanes};
  h::current->collective<Exchange<T>>(op, mine, [](h::Block&, Exchange<T>* const* lanes, int) {
    for (int i = 0; i < h::kLanes; ++i) lanes[i]->result = lanes[lanes[i]->source]->value;
  });
  return mine.result;
}
MLA_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return exchange("shuffle_xor", v, thread_index() ^ mask);
}
MLA_DEVICE float shuffle_xor(float v, int mask) {
  return exchange("shuffle_xor", v, thread_index() ^ mask);
}
inline bool any(bool p) {
  h::current->collective<bool>("any", p, [](h::Block&, bool* const* lanes, int) {
    bool result = false;
    for (int i = 0; i < h::kLanes; ++i) result = result || *lanes[i];
    for (int i = 0; i < h::kLanes; ++i) *lanes[i] = result;
  });
  return p;
}
MLA_DEVICE void sync_warp() { h::current->sync_warp(); }

// ---- block
MLA_DEVICE void sync_block() { h::current->sync_block("sync_block", false); }
MLA_DEVICE bool sync_block_or(bool p) { return h::current->sync_block("sync_block_or", p); }
template <int Threads>
void sync_at(int barrier) {
  h::current->sync_some("sync_at", barrier, Threads, false, true);
}
template <int Threads>
void arrive_at(int barrier) {
  h::current->sync_some("arrive_at", barrier, Threads, false, false);
}
template <int Threads>
bool sync_at_or(int barrier, bool p) {
  return h::current->sync_some("sync_at_or", barrier, Threads, p, true);
}

// ---- programmatic dependent launch
#define MLA_FP8KV_HAS_DEPENDENT_LAUNCH 1
MLA_DEVICE void wait_for_previous_kernel() { h::current->wait_for_previous_kernel(); }
MLA_DEVICE void let_next_kernel_start() {}

}  // namespace mla_fp8kv::ptx
