// What the execution of a launch found wrong.
#pragma once
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

namespace mla_fp8kv::host {

constexpr int kLanes = 32;
constexpr uint8_t kPoison = 0xff;  // a byte of NaN as e4m3, e5m2, FP16, BF16 and FP32

// Shared by the blocks of a launch, which may run on several threads of the CPU.
class Report {
 public:
  void fault(const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (seen_.size() < 20) seen_.insert(message);
  }
  std::string faults() const {
    std::string text;
    for (const std::string& message : seen_) text += message + "\n";
    return text;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> seen_;
};

// Ends the running block, after a fault with which it cannot go on.
[[noreturn]] inline void abort_block(const std::string& message);

}  // namespace mla_fp8kv::host
