/*
 * Which kernel variant the plans of an integer workspace must keep.
 *
 * A CUDA graph replays the variant and grid of its capture, while the framework keeps planning into
 * the same integer workspace before each replay. So the first captured launch fixes the variant of
 * its workspace: run() reports it (keep), plan() asks before it chooses (kept).
 */
#pragma once
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace mla_fp8kv {

class PlanRegistry {
 public:
  // The first variant stays. An address is never forgotten: a workspace that later gets the address
  // of a freed one inherits its variant, which may be slower but gives the same answer.
  void keep(const void* int_workspace, int32_t tile) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tiles_.emplace(int_workspace, tile);
  }

  // -1: no launch of this workspace was captured, any variant will do.
  int32_t kept(const void* int_workspace) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tiles_.find(int_workspace);
    return found == tiles_.end() ? -1 : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const void*, int32_t> tiles_;
};

// One for the module: plan and run are separate translation units of it.
inline PlanRegistry& plan_registry() {
  static PlanRegistry registry;
  return registry;
}

}  // namespace mla_fp8kv
