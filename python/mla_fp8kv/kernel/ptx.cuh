/*
 * Every instruction the kernels issue beyond plain C++, one wrapper each.
 *
 * The kernels include this header and nothing of CUDA, so a second implementation of it
 * (tests/host) runs the very same kernel sources on a CPU. Keep it to that: no policy, no layout.
 * Shared memory is addressed by 32-bit offsets as in PTX; FP16 and BF16 pairs travel as uint32_t,
 * low half first.
 *
 * Needs PTX ISA 7.0 (SM80); what SM89 and SM90 add is behind __CUDA_ARCH__.
 */
#pragma once
#ifdef MLA_FP8KV_HOST
#include "host_ptx.h"
#else
#include <cuda_runtime.h>

#include <cstdint>

#define MLA_DEVICE __device__ __forceinline__
#define MLA_KERNEL(threads, min_ctas) __global__ void __launch_bounds__(threads, min_ctas)

namespace mla_fp8kv::ptx {

constexpr uint32_t kFullMask = 0xffffffffu;

MLA_DEVICE void trap() { __trap(); }

// ---- where am I
MLA_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
// In a way that shows the compiler that it is the same in all lanes.
MLA_DEVICE int warp_index() { return __shfl_sync(kFullMask, threadIdx.x >> 5, 0); }
MLA_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
MLA_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }
MLA_DEVICE int grid_size() { return static_cast<int>(gridDim.x); }
MLA_DEVICE int grid_size_y() { return static_cast<int>(gridDim.y); }

MLA_DEVICE uint32_t shared_base() {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared));
}

// ---- global memory
struct U2 {
  uint32_t x, y;
};
struct U4 {
  uint32_t x, y, z, w;
};

// base + 16 * chunks, in one instruction.
MLA_DEVICE const uint8_t* advance(const uint8_t* base, uint32_t chunks) {
  uint64_t r;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(r) : "r"(chunks), "l"(base));
  return reinterpret_cast<const uint8_t*>(r);
}

// Into L2. No later read sees anything but what memory then holds.
MLA_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Read-only for the whole launch.
MLA_DEVICE int32_t ld_const(const int32_t* p) { return __ldg(p); }
MLA_DEVICE U2 ld_const(const U2* p) {
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
  return {v.x, v.y};
}
MLA_DEVICE U4 ld_const(const U4* p) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
  return {v.x, v.y, v.z, v.w};
}
// Written by another kernel that may still run when this one starts: not through L1.
MLA_DEVICE U4 ld_fresh(const U4* p) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p));
  return {v.x, v.y, v.z, v.w};
}
MLA_DEVICE U2 ld_fresh(const U2* p) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
  return {v.x, v.y};
}
MLA_DEVICE void st_global(uint32_t* p, uint32_t v) { *p = v; }
MLA_DEVICE void st_global(float* p, float v) { *p = v; }
MLA_DEVICE void st_global(U2* p, U2 v) { *reinterpret_cast<uint2*>(p) = make_uint2(v.x, v.y); }
MLA_DEVICE void st_global(U4* p, U4 v) {
  *reinterpret_cast<uint4*>(p) = make_uint4(v.x, v.y, v.z, v.w);
}

// ---- global -> shared, asynchronous
MLA_DEVICE void cp_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// Writes 16 zero bytes and reads nothing when !valid.
MLA_DEVICE void cp_async_16_or_zero(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
MLA_DEVICE void cp_async_4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
MLA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when at most `Pending` of this thread's committed groups are unfinished.
template <int Pending>
MLA_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- shared memory
MLA_DEVICE void ld_shared(uint32_t& v, uint32_t a) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
}
MLA_DEVICE void ld_shared(U2& v, uint32_t a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
}
MLA_DEVICE void ld_shared(U4& v, uint32_t a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
}
MLA_DEVICE void ld_shared(float& v, uint32_t a) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
}
MLA_DEVICE void st_shared(uint32_t a, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}
MLA_DEVICE void st_shared(uint32_t a, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}
MLA_DEVICE void st_shared(uint32_t a, U2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory");
}
MLA_DEVICE void st_shared(uint32_t a, U4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Matrix j is eight 16-byte rows whose addresses lanes 8j..8j+7 pass; lane (g, t) = (lane / 4, lane
// % 4) gets the 4 bytes 4t..4t+3 of row g.
MLA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// The same, transposed in 16-bit units: lane (g, t) gets unit g of row 2t (low half) and of row
// 2t+1 (high half).
MLA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
MLA_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

// ---- tensor core: c[16 x 8] += a[16 x 16] b[16 x 8], FP16 operands, FP32 accumulator.
// Lane (g, t): a[0] (row g, k 2t..), a[1] (row g+8, k 2t..), a[2] (row g, k 2t+8..), a[3] (row g+8,
// k 2t+8..); b[0] (k 2t.., column g), b[1] (k 2t+8.., column g); c[0..1] (row g, columns 2t..),
// c[2..3] (row g+8, columns 2t..).
MLA_DEVICE void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- tensor core, four warps at once (SM90): d[64 x 8 RowTiles] += a[64 x 16] b[16 x 8 RowTiles],
// FP16 operands, FP32 accumulator. Warp w of the four has rows 16w..16w+15 of a and d, as in
// mma_m16n8k16_f16. b lies in shared memory. Asynchronous: d and a belong to the tensor core from
// wgmma() until wgmma_wait() says that the group is done.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MLA_FP8KV_HAS_WGMMA 1
#else
#define MLA_FP8KV_HAS_WGMMA 0
#endif
// b as 8 x 8 cores of 128 contiguous bytes: 8 rows of 8 k (RowsMajor: 8 k of 8 rows) of 16 bytes.
// The next 8 rows are row_stride bytes on, the next 8 k k_stride. The address is in units of 16
// bytes.
MLA_DEVICE uint64_t wgmma_matrix(uint32_t address_16, uint32_t k_stride, uint32_t row_stride) {
  return uint64_t{row_stride >> 4} << 32 | (((k_stride >> 4) << 16) + address_16);
}
template <bool RowsMajor, int RowTiles>
MLA_DEVICE void wgmma(float (&d)[RowTiles][4], const uint32_t (&a)[4], uint64_t b) {
#if MLA_FP8KV_HAS_WGMMA
  static_assert(RowTiles == 2 || RowTiles == 4 || RowTiles == 8);
  if constexpr (RowTiles == 2) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, %12, p, 1, 1, %13;}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(RowsMajor));
  } else if constexpr (RowTiles == 4) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, p, 1, 1, %21;}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(RowsMajor));
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%"
        "24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, p, 1, 1, %37;}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(RowsMajor));
  }
#else
  trap();
#endif
}
// v, in a way that keeps the compiler from computing what depends on it ahead of a loop: for 36
// matrices at constant distances there are not enough registers.
MLA_DEVICE uint32_t not_hoisted(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
// Before a group: orders it after earlier writes to its registers.
MLA_DEVICE void wgmma_begin() {
#if MLA_FP8KV_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
MLA_DEVICE void wgmma_commit() {
#if MLA_FP8KV_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Returns when at most `Pending` of the committed groups are unfinished.
template <int Pending>
MLA_DEVICE void wgmma_wait() {
#if MLA_FP8KV_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}
// After the last wait: keeps the compiler from reading the accumulator before it.
template <int RowTiles>
MLA_DEVICE void wgmma_result(float (&d)[RowTiles][4]) {
#pragma unroll
  for (int n = 0; n < RowTiles; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) asm volatile("" : "+f"(d[n][c])::"memory");
}
// Makes this thread's writes to shared memory visible to wgmma. A barrier must follow.
MLA_DEVICE void publish_to_wgmma() {
#if MLA_FP8KV_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- conversions and arithmetic
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MLA_FP8KV_HAS_CVT_E4M3 1
// Four e4m3 bytes to two FP16 pairs: bytes (0,1) and bytes (2,3). Exact, NaN stays NaN.
MLA_DEVICE void cvt_e4m3x4_f16x2(uint32_t& p01, uint32_t& p23, uint32_t word) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(p01), "=r"(p23)
      : "r"(word));
}
#else
#define MLA_FP8KV_HAS_CVT_E4M3 0
#endif
MLA_DEVICE uint32_t pack_f16x2(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
MLA_DEVICE uint32_t pack_bf16x2(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
MLA_DEVICE void unpack_f16x2(uint32_t v, float& lo, float& hi) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(lo), "=f"(hi)
      : "r"(v));
}
// The larger of each half; the other one if one is NaN.
MLA_DEVICE uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
MLA_DEVICE float as_float(uint32_t v) { return __uint_as_float(v); }
MLA_DEVICE uint32_t as_bits(float v) { return __float_as_uint(v); }
// Byte i of the result is byte selector-nibble i of {a (0..3), b (4..7)}.
MLA_DEVICE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
// The bits of a where mask has ones, of b where it has zeros: one instruction.
MLA_DEVICE uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}
// v, in a way that keeps the compiler from putting an equal expression in place of what follows.
MLA_DEVICE uint32_t as_written(uint32_t v) {
  asm("" : "+r"(v));
  return v;
}
MLA_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
MLA_DEVICE float max(float a, float b) { return fmaxf(a, b); }  // the other one if one is NaN
MLA_DEVICE float fma(float a, float b, float c) { return fmaf(a, b, c); }
MLA_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float divide(float a, float b) { return __fdividef(a, b); }

// ---- warp
MLA_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return __shfl_xor_sync(kFullMask, v, mask);
}
MLA_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(kFullMask, v, mask); }
MLA_DEVICE bool any(bool p) { return __any_sync(kFullMask, p); }
MLA_DEVICE void sync_warp() { __syncwarp(); }

// ---- block
MLA_DEVICE void sync_block() { __syncthreads(); }
MLA_DEVICE bool sync_block_or(bool p) { return __syncthreads_or(p); }
// Barriers 1 to 15, each of `Threads` threads (whole warps) that come to wait or just to say that
// they were there.
template <int Threads>
MLA_DEVICE void sync_at(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}
template <int Threads>
MLA_DEVICE void arrive_at(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}
template <int Threads>
MLA_DEVICE bool sync_at_or(int barrier, bool p) {
  uint32_t any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; "
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(p)), "r"(barrier), "n"(Threads)
      : "memory");
  return any != 0;
}

// ---- programmatic dependent launch (elsewhere kernels of a stream run one after the other anyway)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MLA_FP8KV_HAS_DEPENDENT_LAUNCH 1
#else
#define MLA_FP8KV_HAS_DEPENDENT_LAUNCH 0
#endif
// Nothing an earlier kernel wrote may be read before this. Every CTA must call it before it exits:
// a kernel that follows takes our completion for the completion of all that ran before us.
MLA_DEVICE void wait_for_previous_kernel() {
#if MLA_FP8KV_HAS_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
MLA_DEVICE void let_next_kernel_start() {
#if MLA_FP8KV_HAS_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mla_fp8kv::ptx

#endif  // MLA_FP8KV_HOST
