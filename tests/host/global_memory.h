// The global memory a launch may touch, as buffers with names.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "report.h"

namespace mla_fp8kv::host {

class GlobalMemory {
 public:
  enum Use {
    kRead = 0,
    kFresh = 1,      // written by the kernel before: not to be read before its end is waited for
    kWriteOnce = 2,  // each 4-byte word is written at most once
  };

  void add(const char* name, const void* begin, uint64_t bytes, int use) {
    Buffer buffer{name, static_cast<const uint8_t*>(begin), bytes, use, nullptr};
    if (use & kWriteOnce) buffer.written.reset(new std::atomic<bool>[bytes / 4 + 1]());
    buffers_.push_back(std::move(buffer));
  }

  // `waited`: whether the thread has called wait_for_previous_kernel.
  void check_read(const char* op, const void* p, uint32_t bytes, bool waited, Report& report) {
    const Buffer& buffer = find(op, p, bytes);
    if ((buffer.use & kFresh) && !waited) {
      report.fault(std::string(op) + " reads " + buffer.name + " before wait_for_previous_kernel");
    }
  }
  void check_write(const char* op, const void* p, uint32_t bytes, bool waited, Report& report) {
    Buffer& buffer = find(op, p, bytes);
    const auto what = [&](const char* wrong) {
      return std::string(op) + " writes " + buffer.name + wrong;
    };
    if (!buffer.written) abort_block(what(", which is read-only"));
    if (!waited) report.fault(what(" before wait_for_previous_kernel"));
    const uint64_t offset = static_cast<const uint8_t*>(p) - buffer.begin;
    for (uint64_t word = offset / 4; word < (offset + bytes) / 4; ++word) {
      if (buffer.written[word].exchange(true)) report.fault(what(" a second time"));
    }
  }

 private:
  struct Buffer {
    const char* name;
    const uint8_t* begin;
    uint64_t bytes;
    int use;
    std::unique_ptr<std::atomic<bool>[]> written;
  };

  Buffer& find(const char* op, const void* p, uint32_t bytes) {
    const auto* at = static_cast<const uint8_t*>(p);
    for (Buffer& buffer : buffers_) {
      if (at < buffer.begin || at + bytes > buffer.begin + buffer.bytes) continue;
      if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
        abort_block(std::string(op) + " is misaligned in " + buffer.name);
      }
      return buffer;
    }
    abort_block(std::string(op) + " is outside of every global buffer");
  }

  std::vector<Buffer> buffers_;
};

}  // namespace mla_fp8kv::host
