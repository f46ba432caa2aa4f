/*
 * plan() of the module: device facts and tensors in, plan.h's work list into the pinned workspace.
 *
 * Same signature as the MLA modules FlashInfer generates; SGLang calls it itself before each replay
 * of a CUDA graph.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>

#include "../plan_registry.h"
#include "module.h"

namespace mla_fp8kv {
namespace {

using tvm::ffi::Array;
using tvm::ffi::TensorView;
using tvm::ffi::Tuple;

int64_t bytes_of(const TensorView& t) { return t.numel() * t.dtype().bits / 8; }

const int32_t* host_int32(const TensorView& t, const char* name, int64_t least) {
  if (t.device().device_type != kDLCPU && t.device().device_type != kDLCUDAHost) {
    TVM_FFI_THROW(ValueError) << name << " must be a CPU tensor.";
  }
  if (t.dtype().code != kDLInt || t.dtype().bits != 32 || t.ndim() != 1 || t.stride(0) != 1) {
    TVM_FFI_THROW(ValueError) << name << " must be a contiguous int32 vector.";
  }
  if (t.numel() < least) {
    TVM_FFI_THROW(ValueError) << name << " must have at least " << least << " entries, got "
                              << t.numel() << ".";
  }
  return static_cast<const int32_t*>(t.data_ptr());
}

Tuple<Array<int64_t>, int64_t> plan(TensorView float_workspace, TensorView int_workspace,
                                    TensorView pinned_workspace, TensorView qo_indptr,
                                    TensorView kv_indptr, TensorView kv_len, int64_t num_heads,
                                    int64_t head_dim_o, bool causal) {
  if (head_dim_o != kCkvDim) {
    TVM_FFI_THROW(ValueError) << "head_dim_ckv must be " << kCkvDim << ", got " << head_dim_o
                              << ".";
  }
  const int64_t batch = kv_len.numel();
  const PlanInput in{host_int32(qo_indptr, "qo_indptr", batch + 1),
                     host_int32(kv_indptr, "kv_indptr", batch + 1),
                     host_int32(kv_len, "kv_len_arr", batch),
                     static_cast<int32_t>(batch),
                     static_cast<int32_t>(num_heads),
                     causal};

  const DeviceFacts device = device_facts(float_workspace.device().device_id);
  int32_t limit = device.shared_per_block;
  if (const int32_t forced = environment_number("MLA_FP8KV_SMEM_LIMIT")) {
    limit = std::min(limit, forced);
  }
  // Only where the GPU is not to be taken for another one.
  const bool wgmma = kHasWgmma && device.compute_major == 9 && limit == device.shared_per_block &&
                     environment_switch("MLA_FP8KV_WGMMA", true);
  const int32_t forced_ctas = environment_number("MLA_FP8KV_CTAS_PER_SM");
  const int32_t forced_rows = environment_number("MLA_FP8KV_TILE_ROWS");
  const auto ctas_per_sm = [&](const Variant& v) {
    const int32_t fit = device.shared_per_sm / (v.shared_bytes + kReservedSharedPerCta);
    const int32_t ctas = std::max(1, std::min(v.ctas_per_sm, fit));
    return forced_ctas > 0 ? std::min(ctas, forced_ctas) : ctas;
  };
  // The tiles to choose from, fewest rows first, and which of kVariants they are.
  TileShape shapes[kNumTiles];
  int32_t variant[kNumTiles];
  int32_t num_tiles = 0;
  for (const int32_t rows : {8, 16, 32, 64}) {
    // Of those that fit, one with wgmma, or else the one with the most warps on an SM.
    int32_t best = -1, best_warps = 0;
    for (int32_t i = 0; i < kNumTiles; ++i) {
      const Variant& v = kVariants[i];
      if (v.rows != rows || v.shared_bytes > limit || (v.wgmma && !wgmma)) continue;
      const int32_t warps = v.wgmma ? INT32_MAX : v.warps * ctas_per_sm(v);
      if (warps > best_warps) {
        best = i;
        best_warps = warps;
      }
    }
    if (best < 0) break;  // more rows need more
    const Variant& v = kVariants[best];
    shapes[num_tiles] = make_tile_shape(v.rows, v.tokens, ctas_per_sm(v), v.wgmma);
    variant[num_tiles++] = best;
  }
  if (num_tiles == 0) {
    TVM_FFI_THROW(ValueError) << "FP8 MLA needs " << kVariants[0].shared_bytes
                              << " bytes of shared memory per block, this GPU (or "
                                 "MLA_FP8KV_SMEM_LIMIT) allows "
                              << limit << ".";
  }

  const int32_t kept = plan_registry().kept(
      {int_workspace.data_ptr(), float_workspace.data_ptr(), num_heads, causal});
  int32_t choice = choose_tile(in, shapes, num_tiles);
  for (int32_t i = 0; i < num_tiles; ++i) {
    if (kept < 0 ? shapes[i].rows == forced_rows : variant[i] == kept) choice = i;
  }
  const TileShape& shape = shapes[choice];
  const int32_t grid = grid_size(shape, device.num_sms);
  const int64_t slot_capacity = bytes_of(float_workspace) / partial_bytes(1, shape.rows);
  const int64_t capacity = std::min(bytes_of(int_workspace), bytes_of(pinned_workspace));
  PlanResult result;
  const PlanStatus status =
      make_plan(in, shape, grid, slot_capacity, pinned_workspace.data_ptr(), capacity, result);
  if (status == PlanStatus::kFloatCapacity) {
    TVM_FFI_THROW(ValueError) << "float_workspace_buffer must have at least "
                              << partial_bytes(max_slots(grid), shape.rows)
                              << " bytes for this plan, got " << bytes_of(float_workspace) << ".";
  }
  if (status != PlanStatus::kOk) TVM_FFI_THROW(ValueError) << plan_error(status, result);
  const Array<int64_t> info{kPlanVersion, variant[choice], grid, result.num_merge_items, num_heads};
  return Tuple<Array<int64_t>, int64_t>(info, result.staged_bytes);
}

// The integer workspace is new: no CUDA graph holds a launch of it, whatever lay at its address
// before.
void forget(TensorView int_workspace) { plan_registry().forget(int_workspace.data_ptr()); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget, forget);

}  // namespace
}  // namespace mla_fp8kv
