// Counts how often the banks of shared memory make an access of a warp take more than one pass.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "report.h"

namespace mla_fp8kv::host {

// One instruction, executed by the lanes whose bits are set.
struct WarpAccess {
  const char* op;
  uint32_t bytes;  // a lane
  uint32_t lanes;
  uint32_t addresses[kLanes];
};

// Over all blocks of a launch.
class ConflictCounts {
 public:
  void add(const std::string& op, int64_t extra_passes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[op][0];
    counts_[op][1] += extra_passes;
  }
  // One line an operation: name, accesses of a warp, extra passes they took.
  std::string text() const {
    std::string text;
    for (const auto& [op, count] : counts_) {
      text += op + " " + std::to_string(count[0]) + " " + std::to_string(count[1]) + "\n";
    }
    return text;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::array<int64_t, 2>> counts_;
};

// Lanes go in phases of 128 bytes; a phase takes as many passes as its busiest bank has words to
// give.
inline int64_t extra_passes(const WarpAccess& access) {
  int64_t extra = 0;
  const int lanes_a_phase = static_cast<int>(128 / access.bytes);
  for (int begin = 0; begin < kLanes; begin += lanes_a_phase) {
    std::array<std::set<uint32_t>, 32> banks;
    size_t passes = 1;
    for (int lane = begin; lane < std::min(kLanes, begin + lanes_a_phase); ++lane) {
      if (!(access.lanes >> lane & 1)) continue;
      for (uint32_t i = 0; i < access.bytes; i += 4) {
        const uint32_t word = (access.addresses[lane] + i) / 4;
        banks[word % 32].insert(word);
        passes = std::max(passes, banks[word % 32].size());
      }
    }
    extra += static_cast<int64_t>(passes) - 1;
  }
  return extra;
}

// Puts together what the lanes of a block do one after the other: the n-th time that the lanes of a
// warp come to an instruction is one access.
class ConflictCounter {
 public:
  explicit ConflictCounter(ConflictCounts& counts) : counts_(counts) {}

  void count(const WarpAccess& access) { counts_.add(access.op, extra_passes(access)); }

  void count_lane(const char* op, const void* site, int thread, uint32_t address, uint32_t bytes) {
    const int nth = times_[{site, thread}]++;
    const Key key{reinterpret_cast<uintptr_t>(site), static_cast<uintptr_t>(thread / kLanes),
                  static_cast<uintptr_t>(nth)};
    WarpAccess& access = open_[key];
    access.op = op;
    access.bytes = bytes;
    access.lanes |= 1u << (thread % kLanes);
    access.addresses[thread % kLanes] = address;
    if (access.lanes == 0xffffffffu) {
      count(access);
      open_.erase(key);
    }
  }

  // Also counts what only some lanes did.
  void end_block() {
    for (const auto& [key, access] : open_) count(access);
    open_.clear();
    times_.clear();
  }

 private:
  using Key = std::array<uintptr_t, 3>;
  ConflictCounts& counts_;
  std::map<std::pair<const void*, int>, int> times_;
  std::map<Key, WarpAccess> open_;
};

}  // namespace mla_fp8kv::host
