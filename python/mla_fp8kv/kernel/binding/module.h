/*
 * What this module was compiled for, and what its plan tells its run.
 */
#pragma once
#include <cstdint>

#include "../dequant.cuh"
#include "variants.h"

#if !defined(MLA_FP8KV_E5M2) || !defined(MLA_FP8KV_KPE) || !defined(MLA_FP8KV_DEQUANT_BITS)
#error "the module needs MLA_FP8KV_E5M2, MLA_FP8KV_KPE and MLA_FP8KV_DEQUANT_BITS"
#endif

namespace mla_fp8kv {

constexpr Format kFormat = MLA_FP8KV_E5M2 ? Format::kE5M2 : Format::kE4M3;
constexpr int kKpeDim = MLA_FP8KV_KPE;
constexpr const Variant* kVariants = Variants<kKpeDim>::kAll;
// A module that places bits whatever the GPU shows what GPUs before SM89 do: without wgmma, too.
constexpr bool kHasWgmma = !MLA_FP8KV_DEQUANT_BITS;

// plan() returns these numbers, run() gets them back. A captured launch keeps those of its capture.
enum PlanInfo : int32_t {
  kInfoVersion,
  kInfoTile,
  kInfoGrid,
  kInfoMergeItems,
  kInfoNumHeads,
  kInfoCount
};
constexpr int64_t kPlanVersion = 1;

// Partial results in the float workspace: all outputs, then all statistics. Sized for the FP32
// partials of group scales, since a plan does not know whether its runs have them.
constexpr int64_t partial_stat_offset(int64_t slots, int32_t rows) {
  return slots * rows * kCkvDim * int64_t{sizeof(float)};
}
constexpr int64_t partial_bytes(int64_t slots, int32_t rows) {
  return partial_stat_offset(slots, rows) + slots * rows * 2 * int64_t{sizeof(float)};
}

}  // namespace mla_fp8kv
