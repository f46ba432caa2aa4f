/*
 * Which kernel variant later plans must keep.
 *
 * A CUDA graph replays the variant and grid of its capture, while the framework plans into the same
 * workspaces before each replay. So the first captured launch fixes the variant of every later plan
 * that may be for it: run() reports it (keep), plan() asks before it chooses (kept).
 */
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace mla_fp8kv {

// What a captured launch has baked in and plan() also gets: plans that differ in any of these are
// not for that launch. The rest of what plan() gets may change between replays.
struct PlanOwner {
  const void* int_workspace;
  const void* float_workspace;
  int64_t num_heads;
  bool causal;

  bool operator<(const PlanOwner& other) const {
    return std::tie(int_workspace, float_workspace, num_heads, causal) <
           std::tie(other.int_workspace, other.float_workspace, other.num_heads, other.causal);
  }
};

class PlanRegistry {
 public:
  // The first variant stays.
  void keep(const PlanOwner& owner, int32_t tile) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tiles_.emplace(owner, tile);
  }

  // A new integer workspace may get the address of a freed one: whoever allocates it says so here.
  // Without that it inherits the freed one's variant, which may be slower but gives the right
  // answer.
  void forget(const void* int_workspace) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto entry = tiles_.lower_bound({int_workspace, nullptr, INT64_MIN, false});
    while (entry != tiles_.end() && entry->first.int_workspace == int_workspace) {
      entry = tiles_.erase(entry);
    }
  }

  // -1: no launch of this owner was captured, any variant will do.
  int32_t kept(const PlanOwner& owner) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tiles_.find(owner);
    return found == tiles_.end() ? -1 : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<PlanOwner, int32_t> tiles_;
};

// One for the module: plan and run are separate translation units of it.
inline PlanRegistry& plan_registry() {
  static PlanRegistry registry;
  return registry;
}

}  // namespace mla_fp8kv
