/*
 * run() of the module: tensors to Params, one launch of the attention kernel and one of the merge.
 *
 * Same signature as the MLA modules FlashInfer generates. Here is checked, before anything is
 * launched, all that could make a launch read or write astray. Python calls first and looks for a
 * better sentence (mla_fp8kv/checks.py) only when this has refused: its checks take longer than all
 * of run().
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>

#include "../merge.cuh"
#include "../plan_registry.h"
#include "../staggered_kernel.cuh"
#include "module.h"

namespace mla_fp8kv {
namespace {

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Each architecture compiles one conversion: the hardware's from SM89 on, unless the module was
// built to place bits.
#if MLA_FP8KV_DEQUANT_BITS
constexpr bool kAlwaysPlaceBits = true;
#else
constexpr bool kAlwaysPlaceBits = false;
#endif

struct Launch {
  int device;
  DeviceFacts facts;
  cudaStream_t stream;
  int grid;
  bool merge;
};

template <class Kernel>
void launch(Kernel kernel, dim3 grid, int threads, int shared, const Params& params,
            const Launch& how) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = how.stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = how.facts.compute_major >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "launch of the FP8 MLA kernel");
}

// Kernels that need more than 48 KB of shared memory must ask for it once on each device.
template <auto kKernel>
void allow_shared(int device, int bytes) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (allowed.load(std::memory_order_relaxed) & bit)) return;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

template <class T>
constexpr auto attention_of() {
  if constexpr (T::kStaggered) {
    return &attention_staggered_kernel<T, kFormat, kAlwaysPlaceBits>;
  } else {
    return &attention_kernel<T, kFormat, kAlwaysPlaceBits>;
  }
}

// T computes items of `PlanRows` rows, in parts if it has fewer itself.
template <class T, int PlanRows = T::kRows>
void launch_tile(const Params& params, const Launch& how) {
  static_assert(PlanRows % T::kRows == 0, "parts of an item have equal rows");
  constexpr auto kernel = attention_of<T>();
  constexpr int kParts = PlanRows / T::kRows;
  int shared = T::kSharedBytes;
  // MLA_FP8KV_CTAS_PER_SM wants fewer than fit, to be like a smaller GPU: shared memory that nobody
  // uses keeps others out, for two on one SM would leave another SM idle.
  const int ctas_per_sm = how.grid * kParts / how.facts.num_sms;
  if (ctas_per_sm < T::kCtasPerSm) {
    const int alone = how.facts.shared_per_sm / (ctas_per_sm + 1);
    shared = std::max(shared, std::min(alone, how.facts.shared_per_block));
  }
  allow_shared<kernel>(how.device, how.facts.shared_per_block);
  launch(kernel, dim3(how.grid, kParts), T::kThreads, shared, params, how);
  if (how.merge) {
    launch(merge_kernel<PlanRows, T::kGroupScales>,
           dim3(merge_ctas_per_sm(PlanRows) * how.facts.num_sms), kMergeThreads, kMergeSharedBytes,
           params, how);
  }
}

void launch_variant(int64_t tile, const Params& params, const Launch& how) {
  using T = Tiles<kKpeDim>;
  const bool scaled = params.group_scales != nullptr;
  switch (tile) {
    case 0:
      return scaled ? launch_tile<T::ScaledRows8>(params, how) : launch_tile<T::Rows8>(params, how);
    case 1:
      return scaled ? launch_tile<T::ScaledRows16>(params, how)
                    : launch_tile<T::Rows16>(params, how);
    case 2:
      return scaled ? launch_tile<T::ScaledRows16, 32>(params, how)
                    : launch_tile<T::Rows32>(params, how);
    case 3:
      return scaled ? launch_tile<T::ScaledRows16, 64>(params, how)
                    : launch_tile<T::Rows64>(params, how);
    case 4:
      if constexpr (kHasWgmma) {
        return scaled ? launch_tile<T::ScaledRows16, 32>(params, how)
                      : launch_tile<T::WgmmaRows32>(params, how);
      }
      break;
    case 5:
      if constexpr (kHasWgmma) {
        return scaled ? launch_tile<T::ScaledRows16, 64>(params, how)
                      : launch_tile<T::WgmmaRows64>(params, how);
      }
      break;
    case 6:
      return scaled ? launch_tile<T::ScaledRows16, 32>(params, how)
                    : launch_tile<T::WideRows32>(params, how);
  }
  TVM_FFI_THROW(ValueError) << "plan_info must come from plan() of the same module.";
}

std::string shape_text(const int64_t* sizes, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

template <int N>
void check_shape(const TensorView& t, const char* name, const int64_t (&shape)[N]) {
  bool equal = t.ndim() == N;
  for (int i = 0; equal && i < N; ++i) equal = t.size(i) == shape[i];
  if (!equal) {
    TVM_FFI_THROW(ValueError) << name << " must have shape " << shape_text(shape, N) << ", got "
                              << shape_text(t.shape().data(), t.ndim()) << ".";
  }
}

void check_device(const TensorView& t, const char* name, DLDevice device) {
  if (t.device().device_type != device.device_type || t.device().device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << " must be on the device of float_workspace_buffer.";
  }
}

void check_type(const TensorView& t, const char* name, DLDataType type) {
  if (t.dtype().code != type.code || t.dtype().bits != type.bits || t.dtype().lanes != type.lanes) {
    TVM_FFI_THROW(ValueError) << name << " must be " << tvm::ffi::DLDataTypeToString(type)
                              << ", got " << tvm::ffi::DLDataTypeToString(t.dtype()) << ".";
  }
}

void check_pointer(const TensorView& t, const char* name) {
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % kChunkBytes != 0) {
    TVM_FFI_THROW(ValueError) << name << " must start at a multiple of " << kChunkBytes
                              << " bytes.";
  }
}

// Rows that are read and written in pieces of 16 bytes.
void check_rows(const TensorView& t, const char* name, const int64_t (&shape)[3], DLDevice device) {
  check_shape(t, name, shape);
  check_device(t, name, device);
  if (t.numel() == 0) return;
  check_pointer(t, name);
  bool good = t.stride(2) == 1;
  for (int dim = 0; dim < 2; ++dim) {
    good &= t.size(dim) == 1 || t.stride(dim) * t.dtype().bits / 8 % kChunkBytes == 0;
  }
  if (!good) {
    TVM_FFI_THROW(ValueError) << name
                              << " must be contiguous in its last dimension, with strides that are "
                                 "multiples of "
                              << kChunkBytes << " bytes.";
  }
}

template <int N>
void check_array(const TensorView& t, const char* name, const int64_t (&shape)[N], DLDataType type,
                 DLDevice device) {
  check_shape(t, name, shape);
  check_device(t, name, device);
  check_type(t, name, type);
  if (!t.IsContiguous()) TVM_FFI_THROW(ValueError) << name << " must be contiguous.";
}

void check_scale(double scale, const char* name) {
  if (!(scale > 0) || std::isinf(scale)) {
    TVM_FFI_THROW(ValueError) << name << " must be a finite positive number, got " << scale << ".";
  }
}

// A stride in units of 16 bytes, of which it is a multiple.
uint32_t chunk_stride(const TensorView& t, int dim, const char* name) {
  if (t.size(dim) <= 1) return 0;
  const int64_t span = t.stride(dim) * (t.size(dim) - 1) / kChunkBytes;
  if (span > 0x7fffffff) {
    TVM_FFI_THROW(ValueError) << name << " must span less than 32 GiB in each dimension, got "
                              << span * kChunkBytes << " bytes in dimension " << dim << ".";
  }
  return static_cast<uint32_t>(t.stride(dim) / kChunkBytes);
}

void run(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan_info,
         TensorView q_nope, TensorView q_pe, TensorView ckv, TensorView kpe, TensorView kv_indices,
         TensorView out, Optional<TensorView> maybe_lse, int64_t mask_mode, int64_t num_heads,
         int64_t page_size, double sm_scale, bool lse_base_e, double ckv_scale, double kpe_scale,
         Optional<TensorView> group_scales) {
  if (plan_info.size() != kInfoCount || plan_info[kInfoVersion] != kPlanVersion ||
      plan_info[kInfoTile] < 0 || plan_info[kInfoTile] >= kNumTiles) {
    TVM_FFI_THROW(ValueError) << "plan_info must come from plan() of the same module.";
  }
  if (num_heads != plan_info[kInfoNumHeads]) {
    TVM_FFI_THROW(ValueError) << "the query must have the " << plan_info[kInfoNumHeads]
                              << " heads of the plan, got " << num_heads << ".";
  }
  if (!(sm_scale >= 0) || std::isinf(sm_scale)) {
    TVM_FFI_THROW(ValueError) << "sm_scale must be a finite number that is not negative, got "
                              << sm_scale << ".";
  }
  check_scale(ckv_scale, "ckv_scale");
  check_scale(kpe_scale, "kpe_scale");
  const DLDataType q_type = q_nope.dtype();
  const bool bf16 = q_type.code == kDLBfloat;
  if (q_type.bits != 16 || (!bf16 && q_type.code != kDLFloat)) {
    TVM_FFI_THROW(ValueError) << "the query must be bfloat16 or float16.";
  }
  check_type(q_pe, "q_pe", q_type);
  check_type(out, "out", q_type);
  if (ckv.dtype().bits != 8 || kpe.dtype().bits != 8) {
    TVM_FFI_THROW(ValueError) << "ckv_cache and kpe_cache must have 8-bit elements.";
  }
  if (page_size < 1) {
    TVM_FFI_THROW(ValueError) << "page_size must be positive, got " << page_size << ".";
  }
  const DLDevice on = float_workspace.device();
  const int64_t tokens = q_nope.ndim() > 0 ? q_nope.size(0) : 0;
  const int64_t pages = ckv.ndim() > 0 ? ckv.size(0) : 0;
  check_rows(q_nope, "q_nope", {tokens, num_heads, kCkvDim}, on);
  check_rows(q_pe, "q_pe", {tokens, num_heads, kKpeDim}, on);
  check_rows(out, "out", {tokens, num_heads, kCkvDim}, on);
  check_rows(ckv, "ckv_cache", {pages, page_size, kCkvDim}, on);
  check_rows(kpe, "kpe_cache", {pages, page_size, kKpeDim}, on);
  check_device(int_workspace, "the integer workspace", on);
  const int64_t indices = kv_indices.numel();
  check_array(kv_indices, "kv_indices", {indices}, DLDataType{kDLInt, 32, 1}, on);
  constexpr DLDataType kFloat32{kDLFloat, 32, 1};
  if (maybe_lse.has_value()) {
    check_array(maybe_lse.value(), "lse", {tokens, num_heads}, kFloat32, on);
  }
  if (group_scales.has_value()) {
    check_array(group_scales.value(), "ckv_scale_arr", {pages, page_size, kScaleGroups}, kFloat32,
                on);
    check_pointer(group_scales.value(), "ckv_scale_arr");
  }

  const int device = on.device_id;
  const tvm::ffi::CUDADeviceGuard guard(device);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(on.device_type, device));
  const int64_t tile = plan_info[kInfoTile];
  const int grid = static_cast<int>(plan_info[kInfoGrid]);
  const int32_t rows = kVariants[tile].rows;
  const int64_t slots = max_slots(grid);
  if (float_workspace.numel() * float_workspace.dtype().bits / 8 < partial_bytes(slots, rows)) {
    TVM_FFI_THROW(ValueError) << "float_workspace_buffer is smaller than at plan time.";
  }

  Params p = {};
  p.ckv = static_cast<const uint8_t*>(ckv.data_ptr());
  p.kpe = static_cast<const uint8_t*>(kpe.data_ptr());
  p.ckv_page_stride = chunk_stride(ckv, 0, "ckv_cache");
  p.ckv_token_stride = chunk_stride(ckv, 1, "ckv_cache");
  if (kKpeDim > 0) {
    p.kpe_page_stride = chunk_stride(kpe, 0, "kpe_cache");
    p.kpe_token_stride = chunk_stride(kpe, 1, "kpe_cache");
  }
  p.kv_indices = static_cast<const int32_t*>(kv_indices.data_ptr());
  p.q_nope = static_cast<const uint16_t*>(q_nope.data_ptr());
  p.q_pe = static_cast<const uint16_t*>(q_pe.data_ptr());
  p.out = static_cast<uint16_t*>(out.data_ptr());
  p.q_nope_token_stride = q_nope.stride(0);
  p.q_nope_head_stride = q_nope.stride(1);
  p.q_pe_token_stride = q_pe.stride(0);
  p.q_pe_head_stride = q_pe.stride(1);
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  if (maybe_lse.has_value()) p.lse = static_cast<float*>(maybe_lse.value().data_ptr());
  p.partial_out = float_workspace.data_ptr();
  p.partial_stat = reinterpret_cast<float*>(static_cast<char*>(float_workspace.data_ptr()) +
                                            partial_stat_offset(slots, rows));
  p.plan = static_cast<const uint8_t*>(int_workspace.data_ptr());
  p.merge_offset = merge_offset(grid);
  p.heads = Divisor::of(static_cast<uint32_t>(num_heads));
  p.page_size = Divisor::of(static_cast<uint32_t>(page_size));
  p.score_scale = static_cast<float>(sm_scale * M_LOG2E * ckv_scale);
  p.pe_ratio = static_cast<float>(kpe_scale / ckv_scale);
  p.out_scale = static_cast<float>(ckv_scale);
  p.lse_scale = lse_base_e ? static_cast<float>(M_LN2) : 1.f;
  p.q_is_bf16 = bf16;

  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (captured) {
    const bool causal = mask_mode == 1;  // who sees what is in the work list
    plan_registry().keep({int_workspace.data_ptr(), float_workspace.data_ptr(), num_heads, causal},
                         static_cast<int32_t>(tile));
  }
  // A replay may split what this plan did not: captured launches always have their merge.
  const bool merge = captured || plan_info[kInfoMergeItems] > 0;
  if (group_scales.has_value()) {
    p.group_scales = static_cast<const float*>(group_scales.value().data_ptr());
  }
  launch_variant(tile, p, {device, device_facts(device), stream, grid, merge});
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);

}  // namespace
}  // namespace mla_fp8kv
