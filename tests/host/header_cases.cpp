// Small kernels over the wrappers of host_ptx.h, for test_header.py.
#include <cstdint>
#include <cstring>
#include <string>

#include "host_ptx.h"

namespace ptx = mla_fp8kv::ptx;
namespace host = mla_fp8kv::host;
using host::kSharedBase;

namespace {

struct Result {
  char* text;
  int bytes;
  void set(const std::string& value) const { std::snprintf(text, bytes, "%s", value.c_str()); }
};

template <class Kernel>
std::string run(int warps, uint32_t shared_bytes, host::GlobalMemory& global, Kernel&& kernel,
                bool reverse = false) {
  host::Report report;
  host::ConflictCounts counts;
  host::Launch launch;
  launch.threads = warps * host::kLanes;
  launch.shared_bytes = shared_bytes;
  launch.reverse_warps = reverse;
  host::run(launch, global, report, counts, [&] {
    ptx::wait_for_previous_kernel();
    kernel();
  });
  return report.faults();
}

template <class Kernel>
std::string run(int warps, uint32_t shared_bytes, Kernel&& kernel, bool reverse = false) {
  host::GlobalMemory global;
  return run(warps, shared_bytes, global, kernel, reverse);
}

alignas(16) uint8_t source[1024];
const bool source_filled = [] {
  for (int i = 0; i < 1024; ++i) source[i] = static_cast<uint8_t>(i * 37 + i / 256);
  return true;
}();

void read_word(uint32_t address) {
  uint32_t value;
  ptx::ld_shared(value, address);
}

// Warp 0 writes, warp 1 hears of it at one barrier and tells warp 2 at another, which reads.
enum Passing { kSyncs, kLateWrite, kEarlyRead, kNoArrival };
std::string pass_on(Passing how, bool reverse = false) {
  return run(
      3, 128,
      [&] {
        const int warp = ptx::thread_index() / 32;
        const uint32_t cell = kSharedBase + 4 * (ptx::thread_index() % 32);
        if (warp == 0) {
          if (how != kLateWrite) ptx::st_shared(cell, 7u);
          if (how != kNoArrival) ptx::arrive_at<64>(1);
          if (how == kLateWrite) ptx::st_shared(cell, 7u);
        } else if (warp == 1) {
          ptx::sync_at<64>(1);
          ptx::arrive_at<64>(2);
        } else {
          if (how == kEarlyRead) read_word(cell);
          ptx::sync_at<64>(2);
          read_word(cell);
        }
      },
      reverse);
}

// Each stores the same 4 bytes a thread, then reads what thread ^ `partner` stored, after `order`.
template <class Order>
std::string exchange_through_shared(int partner, bool reverse, Order&& order) {
  return run(
      2, 256,
      [&] {
        const int thread = ptx::thread_index();
        ptx::st_shared(kSharedBase + 4 * thread, static_cast<uint32_t>(thread));
        order();
        uint32_t value;
        ptx::ld_shared(value, kSharedBase + 4 * (thread ^ partner));
        if (value != static_cast<uint32_t>(thread ^ partner)) host::current->fault("wrong value");
      },
      reverse);
}

template <class Before, class After>
std::string copy_then_read(int partner, Before&& before, After&& after) {
  host::GlobalMemory global;
  global.add("source", source, sizeof source, host::GlobalMemory::kRead);
  return run(2, 1024, global, [&] {
    const int thread = ptx::thread_index();
    before();
    ptx::cp_async_16(kSharedBase + 16 * thread, source + 16 * thread);
    ptx::cp_async_commit();
    after();
    ptx::U4 v;
    ptx::ld_shared(v, kSharedBase + 16 * (thread ^ partner));
    if (std::memcmp(&v, source + 16 * (thread ^ partner), 16) != 0)
      host::current->fault("wrong value");
  });
}

std::string run_case(const std::string& name) {
  const auto nothing = [] {};
  const auto block = [] { ptx::sync_block(); };
  const auto warp = [] { ptx::sync_warp(); };
  const auto wait = [] { ptx::cp_async_wait<0>(); };

  // ---- barriers
  if (name == "exchange between warps, barrier") return exchange_through_shared(32, false, block);
  if (name == "exchange between warps, barrier, reversed")
    return exchange_through_shared(32, true, block);
  if (name == "exchange between warps, no barrier")
    return exchange_through_shared(32, false, nothing);
  if (name == "exchange between warps, no barrier, reversed")
    return exchange_through_shared(32, true, nothing);
  if (name == "exchange between warps, warp barrier only")
    return exchange_through_shared(32, false, warp);
  if (name == "exchange within a warp, warp barrier")
    return exchange_through_shared(1, false, warp);
  if (name == "exchange within a warp, block barrier")
    return exchange_through_shared(1, false, block);
  if (name == "exchange within a warp, no barrier")
    return exchange_through_shared(1, false, nothing);
  if (name == "own bytes, no barrier") return exchange_through_shared(0, false, nothing);
  if (name == "write after read, no barrier") {
    return run(2, 256, [&] {
      const int thread = ptx::thread_index();
      ptx::st_shared(kSharedBase + 4 * thread, 1u);
      ptx::sync_block();
      float v;
      ptx::ld_shared(v, kSharedBase + 4 * (thread ^ 32));
      ptx::st_shared(kSharedBase + 4 * thread, 2u);
    });
  }
  if (name == "barrier missed by a warp") {
    return run(2, 64, [] {
      if (ptx::thread_index() < 32) ptx::sync_block();
    });
  }
  if (name == "collective missed by a lane") {
    return run(1, 64, [] {
      if (ptx::thread_index() != 5) ptx::shuffle_xor(1u, 1);
    });
  }
  if (name == "different collectives") {
    return run(1, 64, [] {
      if (ptx::thread_index() < 16) {
        ptx::shuffle_xor(1u, 1);
      } else {
        ptx::any(true);
      }
    });
  }
  if (name == "different barriers") {
    return run(2, 64, [] {
      if (ptx::thread_index() < 32) {
        ptx::sync_block();
      } else {
        ptx::sync_block_or(true);
      }
    });
  }
  if (name == "some warps, in order") return pass_on(kSyncs);
  if (name == "some warps, in order, reversed") return pass_on(kSyncs, true);
  if (name == "some warps, written after the arrival") return pass_on(kLateWrite);
  if (name == "some warps, read without waiting") return pass_on(kEarlyRead);
  if (name == "some warps, one never comes") return pass_on(kNoArrival);
  if (name == "some warps, votes") {
    return run(3, 64, [] {
      const int warp = ptx::thread_index() / 32;
      if (warp == 2) return;
      for (int winner = 0; winner < 65; ++winner) {
        if (ptx::sync_at_or<64>(3, ptx::thread_index() == winner) != (winner < 64)) {
          host::current->fault("wrong vote");
        }
      }
    });
  }
  if (name == "votes") {
    return run(2, 64, [] {
      for (int winner = 0; winner < 65; ++winner) {
        const bool mine = ptx::thread_index() == winner;
        const bool block_vote = ptx::sync_block_or(mine);
        const bool warp_vote = ptx::any(mine);
        if (block_vote != (winner < 64) ||
            warp_vote != (ptx::thread_index() / 32 == winner / 32 && winner < 64)) {
          host::current->fault("wrong vote");
        }
      }
    });
  }
  if (name == "shuffles") {
    return run(2, 64, [] {
      const auto thread = static_cast<uint32_t>(ptx::thread_index());
      for (int i = 0; i < 32; ++i) {
        if (ptx::shuffle_xor(thread, i) != (thread ^ i)) host::current->fault("wrong shuffle_xor");
        if (ptx::shuffle_xor(static_cast<float>(thread), i) != static_cast<float>(thread ^ i)) {
          host::current->fault("wrong shuffle_xor");
        }
      }
    });
  }

  // ---- shared memory
  if (name == "unwritten") {
    return run(1, 64, [] {
      float v;
      ptx::ld_shared(v, kSharedBase);
    });
  }
  if (name == "out of bounds") {
    return run(1, 64, [] { ptx::st_shared(kSharedBase + 64, 1u); });
  }
  if (name == "below the base") {
    return run(1, 64, [] { ptx::st_shared(kSharedBase - 4, 1u); });
  }
  if (name == "misaligned") {
    return run(1, 64, [] { ptx::st_shared(kSharedBase + 4, ptx::U2{1, 2}); });
  }

  // ---- cp.async
  if (name == "copy, wait") return copy_then_read(0, nothing, wait);
  if (name == "copy, no wait") return copy_then_read(0, nothing, nothing);
  if (name == "copy, no wait, barrier") return copy_then_read(0, nothing, block);
  if (name == "copy, waited for an older group") {
    return copy_then_read(0, nothing, [] { ptx::cp_async_wait<1>(); });
  }
  if (name == "copy, waited for two groups of three") {
    const auto empty_group = [] { ptx::cp_async_commit(); };
    return copy_then_read(0, empty_group, [&] {
      empty_group();
      ptx::cp_async_wait<1>();
    });
  }
  if (name == "copy, other warp's bytes, wait only") return copy_then_read(32, nothing, wait);
  if (name == "copy, other lane's bytes, wait only") return copy_then_read(1, nothing, wait);
  if (name == "copy, other lane's bytes, wait, warp barrier") {
    return copy_then_read(1, nothing, [] {
      ptx::cp_async_wait<0>();
      ptx::sync_warp();
    });
  }
  if (name == "copy, other warp's bytes, wait, barrier") {
    return copy_then_read(32, nothing, [] {
      ptx::cp_async_wait<0>();
      ptx::sync_block();
    });
  }
  if (name == "copy, other warp's bytes, barrier before wait") {
    return copy_then_read(32, nothing, [] {
      ptx::sync_block();
      ptx::cp_async_wait<0>();
    });
  }
  if (name == "copy over bytes another warp still reads") {
    return copy_then_read(
        0,
        [] {
          const int thread = ptx::thread_index();
          ptx::st_shared(kSharedBase + 16 * thread, ptx::U4{1, 2, 3, 4});
          ptx::sync_block();
          ptx::U4 v;
          ptx::ld_shared(v, kSharedBase + 16 * (thread ^ 32));
        },
        wait);
  }
  if (name == "copy of 4 bytes") {
    host::GlobalMemory words;
    words.add("words", source, sizeof source, host::GlobalMemory::kRead);
    return run(1, 128, words, [] {
      const int thread = ptx::thread_index();
      ptx::cp_async_4(kSharedBase + 4 * thread, source + 4 * (thread ^ 5));
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      uint32_t v;
      ptx::ld_shared(v, kSharedBase + 4 * thread);
      if (std::memcmp(&v, source + 4 * (thread ^ 5), 4) != 0) host::current->fault("wrong value");
    });
  }
  if (name == "copy zeros") {
    return run(1, 512, [] {
      const uint32_t at = kSharedBase + 16 * ptx::thread_index();
      ptx::cp_async_16_or_zero(at, nullptr, false);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::U4 v;
      ptx::ld_shared(v, at);
      if (v.x | v.y | v.z | v.w) host::current->fault("not zero");
    });
  }

  // ---- global memory
  host::GlobalMemory global;
  global.add("read-only", source, 512, host::GlobalMemory::kRead);
  global.add("out", source + 512, 256, host::GlobalMemory::kWriteOnce);
  const auto* in = reinterpret_cast<const float*>(source);
  auto* out = reinterpret_cast<float*>(source + 512);
  if (name == "global, right") {
    return run(1, 64, global,
               [&] { ptx::st_global(out + ptx::thread_index(), ptx::ld_const(in)); });
  }
  if (name == "global, read out of bounds") {
    return run(1, 64, global, [&] { ptx::ld_const(in + 1000 + ptx::thread_index()); });
  }
  if (name == "global, written twice") return run(1, 64, global, [&] { ptx::st_global(out, 1.f); });
  if (name == "global, write to input") {
    return run(1, 64, global, [&] { ptx::st_global(const_cast<float*>(in), 1.f); });
  }
  if (name == "global, misaligned") {
    return run(1, 64, global, [&] { ptx::ld_const(reinterpret_cast<const ptx::U2*>(in + 1)); });
  }
  if (name == "global, fresh bytes before the wait") {
    host::GlobalMemory fresh;
    fresh.add("partials", source, 512, host::GlobalMemory::kFresh);
    host::Report report;
    host::ConflictCounts counts;
    host::run({}, fresh, report, counts, [&] {
      ptx::ld_fresh(reinterpret_cast<const ptx::U2*>(in));
      ptx::wait_for_previous_kernel();
    });
    return report.faults();
  }
  if (name == "block that never waits for the previous kernel") {
    host::Report report;
    host::ConflictCounts counts;
    host::run({}, global, report, counts, [] {});
    return report.faults();
  }
  return "no such case";
}

}  // namespace

extern "C" {

void faults_of(const char* name, char* text, int bytes) { Result{text, bytes}.set(run_case(name)); }

// kind: 0 x4, 1 x4.trans, 2 x2.trans. `rows` are offsets into `shared`, one a lane; r is [32][4].
void ldmatrix(int kind, const uint8_t* shared, int shared_bytes, const uint32_t* rows, uint32_t* r,
              char* text, int bytes) {
  host::GlobalMemory global;
  global.add("image", shared, shared_bytes, host::GlobalMemory::kRead);
  host::Report report;
  host::ConflictCounts counts;
  host::Launch launch;
  launch.shared_bytes = shared_bytes;
  launch.count_conflicts = true;
  host::run(launch, global, report, counts, [&] {
    ptx::wait_for_previous_kernel();
    const int lane = ptx::thread_index();
    for (int i = 16 * lane; i < shared_bytes; i += 16 * host::kLanes)
      ptx::cp_async_16(kSharedBase + i, shared + i);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::sync_warp();
    uint32_t four[4] = {}, two[2] = {};
    if (kind == 0) ptx::ldmatrix_x4(four, kSharedBase + rows[lane]);
    if (kind == 1) ptx::ldmatrix_x4_trans(four, kSharedBase + rows[lane]);
    if (kind == 2) {
      ptx::ldmatrix_x2_trans(two, kSharedBase + rows[lane]);
      std::memcpy(four, two, sizeof two);
    }
    std::memcpy(r + 4 * lane, four, sizeof four);
  });
  Result{text, bytes}.set(report.faults() + counts.text());
}

void mma(float* c, const uint32_t* a, const uint32_t* b) {
  run(1, 64, [&] {
    const int lane = ptx::thread_index();
    float my_c[4];
    uint32_t my_a[4];
    std::memcpy(my_c, c + 4 * lane, sizeof my_c);
    std::memcpy(my_a, a + 4 * lane, sizeof my_a);
    ptx::mma_m16n8k16_f16(my_c, my_a, b[2 * lane], b[2 * lane + 1]);
    std::memcpy(c + 4 * lane, my_c, sizeof my_c);
  });
}

void pack_f16(const float* values, uint32_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) pairs[i] = ptx::pack_f16x2(values[2 * i], values[2 * i + 1]);
}
void pack_bf16(const float* values, uint32_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) pairs[i] = ptx::pack_bf16x2(values[2 * i], values[2 * i + 1]);
}
void unpack_f16(const uint32_t* pairs, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) ptx::unpack_f16x2(pairs[i], values[2 * i], values[2 * i + 1]);
}
void convert_e4m3(const uint32_t* words, uint32_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    ptx::cvt_e4m3x4_f16x2(pairs[2 * i], pairs[2 * i + 1], words[i]);
}
// what: 0 exp2, 1 log2
void approximate(int what, const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = what == 0 ? ptx::exp2(x[i]) : ptx::log2(x[i]);
}
float divide(float a, float b) { return ptx::divide(a, b); }
float maximum(float a, float b) { return ptx::max(a, b); }
uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return ptx::byte_permute(a, b, selector);
}
uint32_t mul_high(uint32_t a, uint32_t b) { return ptx::mul_high(a, b); }

}  // extern "C"
