// One attention call on the host: the plan, the attention kernel and the merge kernel of
// python/mla_fp8kv/kernel, as the binding launches them. Compiled once for each MLA_FP8KV_TILE (a
// name in traits.cuh) and the plan's tile (_PLAN_ROWS, _PLAN_TOKENS), _E5M2, _KPE and _HAS_CVT_E4M3
// (1: what SM89 and newer compile to; 0: SM80 and SM86).
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "merge.cuh"
#include "plan.h"
#include "staggered_kernel.cuh"

namespace host = mla_fp8kv::host;
using namespace mla_fp8kv;

extern "C" {

struct Buffer {
  void* data;
  int64_t bytes;
};

// Mirrored by kernel_call.py.
struct Call {
  Buffer ckv, kpe, kv_indices, group_scales, q_nope, q_pe, out, lse;
  const int32_t *qo_indptr, *kv_indptr, *kv_len;
  int32_t batch, heads, causal, page_size;
  int64_t ckv_page_stride, ckv_token_stride, kpe_page_stride, kpe_token_stride;          // bytes
  int64_t q_nope_token_stride, q_nope_head_stride, q_pe_token_stride, q_pe_head_stride;  // elements
  int64_t out_token_stride, out_head_stride;
  float sm_scale, ckv_scale, kpe_scale;
  int32_t lse_base_e, q_is_bf16;
  int32_t grid, merge_grid;
  int32_t workers, reverse_warps, count_conflicts;
};

}  // extern "C"

namespace {

constexpr Format kFormat = MLA_FP8KV_E5M2 ? Format::kE5M2 : Format::kE4M3;
using T = Tiles<MLA_FP8KV_KPE>::MLA_FP8KV_TILE;

Params make_params(const Call& call) {
  Params p{};
  p.ckv = static_cast<const uint8_t*>(call.ckv.data);
  p.kpe = static_cast<const uint8_t*>(call.kpe.data);
  p.ckv_page_stride = static_cast<uint32_t>(call.ckv_page_stride / 16);
  p.ckv_token_stride = static_cast<uint32_t>(call.ckv_token_stride / 16);
  p.kpe_page_stride = static_cast<uint32_t>(call.kpe_page_stride / 16);
  p.kpe_token_stride = static_cast<uint32_t>(call.kpe_token_stride / 16);
  p.kv_indices = static_cast<const int32_t*>(call.kv_indices.data);
  p.group_scales = static_cast<const float*>(call.group_scales.data);
  p.q_nope = static_cast<const uint16_t*>(call.q_nope.data);
  p.q_pe = static_cast<const uint16_t*>(call.q_pe.data);
  p.out = static_cast<uint16_t*>(call.out.data);
  p.lse = static_cast<float*>(call.lse.data);
  p.q_nope_token_stride = call.q_nope_token_stride;
  p.q_nope_head_stride = call.q_nope_head_stride;
  p.q_pe_token_stride = call.q_pe_token_stride;
  p.q_pe_head_stride = call.q_pe_head_stride;
  p.out_token_stride = call.out_token_stride;
  p.out_head_stride = call.out_head_stride;
  p.heads = Divisor::of(call.heads);
  p.page_size = Divisor::of(call.page_size);
  p.score_scale = call.sm_scale * 1.44269504088896340736f * call.ckv_scale;
  p.pe_ratio = call.kpe_scale / call.ckv_scale;
  p.out_scale = call.ckv_scale;
  p.lse_scale = call.lse_base_e ? 0.69314718055994530942f : 1.f;
  p.q_is_bf16 = call.q_is_bf16;
  return p;
}

void attend(const Call& call, host::Report& report, host::ConflictCounts& counts) {
  // The tile the plan chose; with group scales, T may have fewer rows and do it in parts.
  constexpr int64_t kPlanRows = MLA_FP8KV_PLAN_ROWS, kPartialElement = T::kGroupScales ? 4 : 2;
  const TileShape tile =
      make_tile_shape(kPlanRows, MLA_FP8KV_PLAN_TOKENS, T::kCtasPerSm, T::kWgmma);
  const PlanInput input{call.qo_indptr, call.kv_indptr, call.kv_len,
                        call.batch,     call.heads,     call.causal != 0};
  const int64_t slots = max_slots(call.grid);
  std::vector<WorkItem> plan(1 << 14);
  PlanResult result;
  const PlanStatus status = make_plan(input, tile, call.grid, slots, plan.data(),
                                      static_cast<int64_t>(plan.size() * sizeof(WorkItem)), result);
  if (status != PlanStatus::kOk) {
    report.fault("plan: " + plan_error(status, result));
    return;
  }

  // A float array, so that both arrays of partials are aligned as the float workspace is.
  const int64_t out_bytes = slots * kPlanRows * kCkvDim * kPartialElement,
                stat_bytes = slots * kPlanRows * 8;
  std::vector<WorkItem> partials((out_bytes + stat_bytes) / sizeof(WorkItem) + 1);
  auto* const partial_bytes = reinterpret_cast<uint8_t*>(partials.data());
  std::memset(partial_bytes, host::kPoison, partials.size() * sizeof(WorkItem));
  Params p = make_params(call);
  p.plan = reinterpret_cast<const uint8_t*>(plan.data());
  p.merge_offset = merge_offset(call.grid);
  p.partial_out = partial_bytes;
  p.partial_stat = reinterpret_cast<float*>(partial_bytes + out_bytes);

  host::GlobalMemory global;
  const auto add = [&](const char* name, const Buffer& buffer, int use) {
    if (buffer.data) global.add(name, buffer.data, buffer.bytes, use);
  };
  add("ckv", call.ckv, host::GlobalMemory::kFresh);
  add("kpe", call.kpe, host::GlobalMemory::kFresh);
  add("kv_indices", call.kv_indices, host::GlobalMemory::kFresh);
  add("group_scales", call.group_scales, host::GlobalMemory::kFresh);
  add("q_nope", call.q_nope, host::GlobalMemory::kFresh);
  add("q_pe", call.q_pe, host::GlobalMemory::kFresh);
  add("out", call.out, host::GlobalMemory::kWriteOnce);
  add("lse", call.lse, host::GlobalMemory::kWriteOnce);
  // Copied to the device before the kernels, so it may be read at once.
  global.add("plan", plan.data(), result.staged_bytes, host::GlobalMemory::kRead);
  global.add("partials", partial_bytes, out_bytes,
             host::GlobalMemory::kWriteOnce | host::GlobalMemory::kFresh);
  global.add("partial stats", p.partial_stat, stat_bytes,
             host::GlobalMemory::kWriteOnce | host::GlobalMemory::kFresh);

  host::Launch launch;
  launch.reverse_warps = call.reverse_warps != 0;
  launch.count_conflicts = call.count_conflicts != 0;
  launch.workers = call.workers;
  launch.grid_x = call.grid;
  launch.grid_y = kPlanRows / T::kRows;
  launch.threads = T::kThreads;
  launch.shared_bytes = T::kSharedBytes;
  host::run(launch, global, report, counts, [&] {
    if constexpr (T::kStaggered) {
      attention_staggered_kernel<T, kFormat, /*PlaceBits=*/false>(p);
    } else {
      attention_kernel<T, kFormat, /*PlaceBits=*/false>(p);
    }
  });
  launch.grid_x = call.merge_grid;
  launch.grid_y = 1;
  launch.threads = kMergeThreads;
  launch.shared_bytes = kMergeSharedBytes;
  host::run(launch, global, report, counts, [&] { merge_kernel<kPlanRows, T::kGroupScales>(p); });
}

}  // namespace

// The answer is the faults, a form feed, and the bank conflicts.
extern "C" void run_attention(const Call* call, char* text, int bytes) {
  host::Report report;
  host::ConflictCounts counts;
  attend(*call, report, counts);
  std::snprintf(text, bytes, "%s", (report.faults() + "\f" + counts.text()).c_str());
}
