/*
 * What the host hands to the kernels: the work list a plan writes and the parameters of one launch.
 *
 * Plain data, no CUDA and no torch, so that the plan, the host tests and the device code share it.
 *
 * The integer workspace of a plan holds, from its start:
 *
 *   PlanHeader          read by the merge kernel only
 *   CtaWork   [grid]    at kCtaWorkOffset; CTA c reads record c and nothing before it, so the first
 *                       KV load waits for one global load, not for two
 *   MergeItem [...]     at merge_offset(grid)
 *   WorkItem  [...]     further items of CTAs that have more than one
 */
#pragma once
#include <cstdint>

namespace mla_fp8kv {

// Rows of a request are packed (query, head) pairs: row = query * num_heads + head.
struct alignas(16) WorkItem {
  int32_t q_begin;     // qo_indptr[b]: token row of Q, out and lse at which the request begins
  int32_t row_begin;   // first packed row of the item, counted within the request
  int32_t rows;        // packed rows of the item: 1..tile rows; 0: the CTA has no work
  int32_t partial;     // partial slot to write; -1: the item sees all KV of its rows, write out
  int32_t page_begin;  // kv_indptr[b]: first entry of the request in kv_indices
  int32_t kv_begin;    // tokens [kv_begin, kv_end) of the request; never empty when rows > 0
  int32_t kv_end;
  int32_t causal_end;  // row r sees tokens < causal_end + r / num_heads; kNotCausal: all of them
};
static_assert(sizeof(WorkItem) == 32, "WorkItem is read as two 16-byte loads");

constexpr int32_t kNotCausal = 0x3fffffff;
constexpr int32_t kMaxKvLen = 0x3fffffff;  // so that causal_end + query stays inside int32

struct alignas(16) CtaWork {
  WorkItem first;
  int32_t more_begin;  // further items, as an index of WorkItems from the start of the workspace
  int32_t more_count;
  int32_t reserved[2];
};
static_assert(sizeof(CtaWork) == 48, "CtaWork is read as three 16-byte loads");

// Rows whose KV was split: out = merge of partial slots [slot_begin, slot_begin + count).
// count 0: rows that see no token at all; they get out 0 and lse -inf.
struct alignas(16) MergeItem {
  int32_t q_begin;
  int32_t row_begin;
  int32_t rows;
  int32_t slot_begin;
  int32_t count;
  int32_t reserved[3];
};
static_assert(sizeof(MergeItem) == 32, "MergeItem is read as two 16-byte loads");

// The reference before any score. Finite, so that a masked score (-inf) minus it is -inf and not
// NaN.
constexpr float kNoReference = -1e30f;

// The merge reads this many partials of a row at once, or half as many.
constexpr int32_t kFewPartials = 16;

struct alignas(16) PlanHeader {
  int32_t num_merge_items;
  int32_t num_many;  // the first num_many merge items are those whose partials are shared out
  int32_t reserved[14];
};
static_assert(sizeof(PlanHeader) == 64, "CtaWork records start right after the header");
constexpr int64_t kCtaWorkOffset = sizeof(PlanHeader);

// Where the merge items are, in bytes, and how many there are at least, those without rows after
// the plan's own: a block of the merge reads its first item before it knows their number.
constexpr int32_t merge_offset(int32_t grid) {
  constexpr int64_t align = sizeof(MergeItem);
  return static_cast<int32_t>((kCtaWorkOffset + grid * int64_t{sizeof(CtaWork)} + align - 1) /
                              align * align);
}
constexpr int64_t least_merge_items(int32_t grid) { return grid / 2 + 1; }

// Unsigned division of n < 2^31 by a divisor >= 1 that the host knows: n / d = (mul_high(n, mul) +
// n) >> shift.
struct Divisor {
  uint32_t value, mul, shift;

  static Divisor of(uint32_t d) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < d) ++shift;
    const uint64_t mul = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1;
    return {d, static_cast<uint32_t>(mul), shift};
  }
};

// One launch of the attention kernel and of the merge that follows it.
struct Params {
  // Paged caches, FP8. Strides in units of 16 bytes; a row's offset, also in those units, fits 32
  // bits (64 GiB).
  const uint8_t* ckv;  // [pages, page_size, 512]
  const uint8_t* kpe;  // [pages, page_size, kpe dim]
  uint32_t ckv_page_stride, ckv_token_stride;
  uint32_t kpe_page_stride, kpe_token_stride;
  const int32_t* kv_indices;
  const float*
      group_scales;  // [pages, page_size, 4], one per 128 dims of ckv; null without group scales

  // 16-bit queries and output; strides in elements.
  const uint16_t* q_nope;  // [tokens, heads, 512]
  const uint16_t* q_pe;    // [tokens, heads, kpe dim]
  uint16_t* out;           // [tokens, heads, 512]
  float* lse;              // [tokens, heads] contiguous, or null
  int64_t q_nope_token_stride, q_nope_head_stride;
  int64_t q_pe_token_stride, q_pe_head_stride;
  int64_t out_token_stride, out_head_stride;

  void* partial_out;  // [slots][tile rows][512], FP16 (FP32 with group scales), divided by the sum
  float* partial_stat;   // [slots][tile rows][2]: reference maximum (base 2), sum
  const uint8_t* plan;   // the integer workspace
  int32_t merge_offset;  // of its merge items

  Divisor heads, page_size;
  float score_scale;  // logits in base 2 are this x (q . k as the MMA sees it); holds sm_scale,
                      // log2 e, ckv_scale
  float pe_ratio;     // kpe_scale / ckv_scale
  float out_scale;    // ckv_scale
  float lse_scale;    // 1: LSE in base 2; ln 2: natural
  int32_t q_is_bf16;  // otherwise FP16; out has the type of q
};

}  // namespace mla_fp8kv
