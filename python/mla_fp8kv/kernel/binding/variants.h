/*
 * The shipped tiles as the host sees them: a table for the choice at plan time, and what of a GPU
 * decides it.
 */
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "../plan.h"
#include "../traits.cuh"

namespace mla_fp8kv {

struct Variant {
  int32_t rows, tokens, warps, ctas_per_sm;
  int32_t
      shared_bytes;  // the larger of the forms with and without group scales: a plan serves both
  bool wgmma;        // SM90 only
};

template <class Plain, class Scaled>
constexpr Variant variant_of() {
  return {Plain::kRows,
          Plain::kTokens,
          Plain::kWarps,
          Plain::kCtasPerSm,
          std::max(Plain::kSharedBytes, Scaled::kSharedBytes),
          Plain::kWgmma};
}

template <int KpeDim>
struct Variants {
  using T = Tiles<KpeDim>;
  static constexpr Variant kAll[kNumTiles] = {
      variant_of<typename T::Rows8, typename T::ScaledRows8>(),
      variant_of<typename T::Rows16, typename T::ScaledRows16>(),
      variant_of<typename T::Rows32, typename T::ScaledRows16>(),
      variant_of<typename T::Rows64, typename T::ScaledRows16>(),
      variant_of<typename T::WgmmaRows32, typename T::ScaledRows16>(),
      variant_of<typename T::WgmmaRows64, typename T::ScaledRows16>(),
      variant_of<typename T::WideRows32, typename T::ScaledRows16>()};
};

struct DeviceFacts {
  int32_t num_sms, compute_major, shared_per_block, shared_per_sm;
};

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << " failed: " << cudaGetErrorString(status) << ".";
  }
}

inline DeviceFacts device_facts(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, DeviceFacts> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
  };
  const DeviceFacts facts{attribute(cudaDevAttrMultiProcessorCount),
                          attribute(cudaDevAttrComputeCapabilityMajor),
                          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
  known.emplace(device, facts);
  return facts;
}

// A positive number from the environment, 0 if unset.
inline int32_t environment_number(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value <= 0 || value > 0x7fffffff) {
    TVM_FFI_THROW(ValueError) << name << " must be a positive number, got '" << text << "'.";
  }
  return static_cast<int32_t>(value);
}

// 0 or 1 from the environment, `otherwise` if unset.
inline bool environment_switch(const char* name, bool otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  if ((*text != '0' && *text != '1') || text[1] != '\0') {
    TVM_FFI_THROW(ValueError) << name << " must be 0 or 1, got '" << text << "'.";
  }
  return *text == '1';
}

}  // namespace mla_fp8kv
