// Thread blocks on the CPU: lanes are fibers, warp-collective operations and barriers are
// rendezvous points.
//
// What a GPU would do silently wrong is reported with the operations' names:
//   * out of bounds or misaligned shared and registered global memory;
//   * a read of shared memory never written, or whose cp.async was not waited for (its bytes are
//     NaN codes until then);
//   * two threads touching the same word, one writing, with no barrier between (also within a
//     warp: sync_warp);
//   * lanes of a warp, warps of a block or of a barrier, that meet at different operations or never
//     meet;
//   * bank conflicts, counted per operation.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bank_conflicts.h"
#include "fiber.h"
#include "global_memory.h"
#include "report.h"
#include "shared_memory.h"

namespace mla_fp8kv::host {

struct Launch {
  int grid_x = 1, grid_y = 1;
  int threads = kLanes;
  uint32_t shared_bytes = 0;
  bool reverse_warps = false;  // run the warps in the other order
  bool count_conflicts = false;
  int workers = 1;  // threads of the CPU
};

// A wgmma, as one lane issued it.
struct AsyncProduct {
  float* d;           // [row_tiles][4]
  const uint32_t* a;  // [4], must keep what it holds until the product is waited for
  uint32_t a_at_issue[4];
  uint64_t b;
  int row_tiles;
  bool rows_major;
};

class Block;
inline thread_local Block* current = nullptr;

class Block {
 public:
  Block(const Launch& launch, int index, const Stacks& stacks, GlobalMemory& global, Report& report,
        ConflictCounts& counts)
      : shared(launch.shared_bytes, launch.threads / kLanes, report),
        launch_(launch),
        index_(index),
        global_(global),
        report_(report),
        conflicts_(counts),
        lanes_(launch.threads),
        warps_(launch.threads / kLanes) {
    for (int i = 0; i < launch.threads; ++i) lanes_[i].fiber.prepare(stacks.of(i), &Block::enter);
  }

  void run(const std::function<void()>& kernel) {
    kernel_ = &kernel;
    current = this;
    thread_ = launch_.reverse_warps ? launch_.threads - kLanes : 0;
    Fiber::change(main_, lanes_[thread_].fiber);
    current = nullptr;
    const auto waited = [](const Lane& lane) { return lane.waited; };
    const auto idle = [](const Lane& lane) { return lane.products.empty(); };
    if (!aborted_ && !std::all_of(lanes_.begin(), lanes_.end(), idle)) {
      report_.fault("a block exits with a wgmma that nobody waited for");
    }
    if (!aborted_ && !std::all_of(lanes_.begin(), lanes_.end(), waited)) {
      report_.fault("a block exits and never called wait_for_previous_kernel");
    }
    conflicts_.end_block();
  }

  // ---- for the wrappers of host_ptx.h
  SharedMemory shared;
  int thread() const { return thread_; }
  int block_x() const { return index_ % launch_.grid_x; }
  int block_y() const { return index_ / launch_.grid_x; }
  const Launch& launch() const { return launch_; }
  void fault(const std::string& message) { report_.fault(message); }
  [[noreturn]] void abort(const std::string& message) {
    report_.fault(message);
    aborted_ = true;
    _longjmp(main_, 1);
  }

  // Blocks until all lanes of the warp passed their argument here; the last one executes for all.
  template <class Args>
  void collective(const char* op, Args& args, void (*execute)(Block&, Args* const*, int first)) {
    Warp& warp = warps_[thread_ / kLanes];
    if (warp.arrived != 0 && std::strcmp(warp.op, op) != 0) {
      abort(std::string(op) + " meets " + warp.op + " of other lanes of the warp");
    }
    warp.op = op;
    warp.args[thread_ % kLanes] = &args;
    warp.arrived |= 1u << (thread_ % kLanes);
    if (warp.arrived != kAllLanes) return wait_turn();
    Args* all[kLanes];
    for (int i = 0; i < kLanes; ++i) all[i] = static_cast<Args*>(warp.args[i]);
    execute(*this, all, thread_ / kLanes * kLanes);
    warp.arrived = 0;
    warp.runnable = kAllLanes;
  }

  void sync_warp() {
    int nothing = 0;
    collective<int>("sync_warp", nothing, [](Block& block, int* const*, int first) {
      block.shared.clocks.sync_warp(first / kLanes);
    });
  }

  // True if any thread voted so.
  bool sync_block(const char* op, bool vote) {
    if (arrived_ > 0 && std::strcmp(op_, op) != 0) {
      abort(std::string(op) + " meets " + op_ + " of other threads");
    }
    op_ = op;
    votes_ = arrived_ == 0 ? vote : votes_ || vote;
    if (++arrived_ < launch_.threads) {
      wait_turn();
    } else {
      arrived_ = 0;
      result_ = votes_;
      for (Warp& warp : warps_) warp.runnable = kAllLanes;
      shared.clocks.sync_block();
    }
    return result_;
  }

  // A barrier of `threads` threads, whole warps, that come to wait or just to say that they were
  // there. True for those that wait if any thread voted so.
  bool sync_some(const char* op, int barrier, int threads, bool vote, bool wait) {
    const int index = thread_ / kLanes;
    Warp& warp = warps_[index];
    if (warp.arrived != 0 && (std::strcmp(warp.op, op) != 0 || warp.barrier != barrier)) {
      abort(std::string(op) + " meets " + warp.op + " of other lanes of the warp");
    }
    warp.op = op;
    warp.barrier = barrier;
    warp.vote = warp.arrived == 0 ? vote : warp.vote || vote;
    warp.arrived |= 1u << (thread_ % kLanes);
    if (warp.arrived != kAllLanes) {
      wait_turn();
      return warp.answer;
    }
    warp.arrived = 0;
    SomeWarps& some = some_warps_[barrier];
    if (some.arrived > 0 && some.threads != threads) abort("a barrier of different counts");
    some.threads = threads;
    some.arrived += kLanes;
    some.vote = some.vote || warp.vote;
    shared.clocks.arrive(index, some.known);
    if (wait) some.waiting.push_back(index);
    const bool complete = some.arrived == threads;
    if (complete) {
      if (some.waiting.empty()) abort("a barrier that nobody waits at");
      for (const int waiting : some.waiting) {
        warps_[waiting].answer = some.vote;
        warps_[waiting].runnable = kAllLanes;
        shared.clocks.leave(waiting, some.known);
      }
      some = {};
    }
    if (!wait) warp.runnable = kAllLanes;
    if (wait && !complete) wait_turn();
    return warp.answer;
  }

  // ---- cp.async: a copy lands when its thread waits for it
  void issue_copy(const char* op, uint32_t dst, const void* src, uint32_t bytes) {
    shared.begin_copy(op, dst, bytes, thread_);
    if (src != nullptr) read_global(op, src, bytes);
    lanes_[thread_].copies.push_back({op, dst, bytes, src});
  }
  void commit_copies() {
    Lane& lane = lanes_[thread_];
    lane.group_ends.push_back(lane.copies.size());
  }
  void wait_copies(size_t pending) {
    Lane& lane = lanes_[thread_];
    if (lane.group_ends.size() <= pending) return;
    const size_t groups = lane.group_ends.size() - pending;
    const size_t count = lane.group_ends[groups - 1];
    for (size_t i = 0; i < count; ++i) {
      const Copy& copy = lane.copies[i];
      shared.end_copy(copy.op, copy.dst, copy.bytes, copy.src, thread_);
    }
    lane.copies.erase(lane.copies.begin(), lane.copies.begin() + count);
    lane.group_ends.erase(lane.group_ends.begin(), lane.group_ends.begin() + groups);
    for (size_t& end : lane.group_ends) end -= count;
  }

  // ---- wgmma: a product is executed, by all lanes of the warp, when it is waited for
  void begin_products() { lanes_[thread_].products_begun = true; }
  void issue_product(const AsyncProduct& product) {
    Lane& lane = lanes_[thread_];
    if (!lane.products_begun) report_.fault("wgmma without wgmma_begin before its group");
    lane.products.push_back(product);
  }
  void commit_products() {
    Lane& lane = lanes_[thread_];
    lane.products_begun = false;
    lane.product_ends.push_back(lane.products.size());
  }
  void wait_products(size_t pending, void (*execute)(Block&, AsyncProduct* const*, int)) {
    Lane& lane = lanes_[thread_];
    if (lane.product_ends.size() <= pending) return;
    const size_t groups = lane.product_ends.size() - pending;
    const size_t count = lane.product_ends[groups - 1];
    for (size_t i = 0; i < count; ++i) collective("wgmma", lane.products[i], execute);
    lane.products.erase(lane.products.begin(), lane.products.begin() + count);
    lane.product_ends.erase(lane.product_ends.begin(), lane.product_ends.begin() + groups);
    for (size_t& end : lane.product_ends) end -= count;
  }

  // ---- global memory
  void read_global(const char* op, const void* p, uint32_t bytes) {
    global_.check_read(op, p, bytes, lanes_[thread_].waited, report_);
  }
  void write_global(const char* op, const void* p, uint32_t bytes) {
    global_.check_write(op, p, bytes, lanes_[thread_].waited, report_);
  }
  void wait_for_previous_kernel() { lanes_[thread_].waited = true; }

  // ---- bank conflicts
  void count_lane(const char* op, const void* site, uint32_t address, uint32_t bytes) {
    if (launch_.count_conflicts) conflicts_.count_lane(op, site, thread_, address, bytes);
  }
  void count(const WarpAccess& access) {
    if (launch_.count_conflicts) conflicts_.count(access);
  }

 private:
  static constexpr uint32_t kAllLanes = 0xffffffffu;

  struct Copy {
    const char* op;
    uint32_t dst, bytes;
    const void* src;
  };
  struct Lane {
    Fiber fiber;
    bool waited = false;
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;  // of the committed groups, in `copies`
    bool products_begun = false;
    std::vector<AsyncProduct> products;
    std::vector<size_t> product_ends;
  };
  struct Warp {
    uint32_t runnable = kAllLanes;
    uint32_t arrived = 0;  // at the collective operation `op`
    const char* op = "";
    void* args[kLanes];
    int barrier = 0;
    bool vote = false;  // at `barrier`
    bool answer = false;
  };
  struct SomeWarps {  // at a barrier
    int arrived = 0, threads = 0;
    bool vote = false;
    std::vector<int> waiting;
    std::vector<uint32_t> known;
  };

  // ---- turns
  static void enter() {
    Block& block = *current;
    (*block.kernel_)();
    const int next = block.next_runnable();
    if (next < 0) block.end();
    block.thread_ = next;
    block.lanes_[next].fiber.resume();
  }
  void wait_turn() {
    const int me = thread_;
    const int next = next_runnable();
    if (next < 0) end();
    thread_ = next;
    Fiber::change(lanes_[me].fiber.context, lanes_[next].fiber);
  }
  // Takes the running lane off the list; the next one is of the same warp if any can run.
  int next_runnable() {
    const int warp = thread_ / kLanes, warps = static_cast<int>(warps_.size());
    warps_[warp].runnable &= ~(1u << (thread_ % kLanes));
    for (int i = 0; i < warps; ++i) {
      const int candidate = (warp + (launch_.reverse_warps ? warps - i : i)) % warps;
      if (const uint32_t runnable = warps_[candidate].runnable) {
        return candidate * kLanes + __builtin_ctz(runnable);
      }
    }
    return -1;
  }
  // No thread can run: all have returned, or some wait in vain.
  [[noreturn]] void end() {
    std::string waiting;
    if (arrived_ > 0) {
      waiting += " " + std::to_string(arrived_) + " of " + std::to_string(launch_.threads) +
                 " threads at " + op_;
    }
    for (size_t w = 0; w < warps_.size(); ++w) {
      if (warps_[w].arrived == 0) continue;
      waiting += " " + std::to_string(__builtin_popcount(warps_[w].arrived)) + " lanes of warp " +
                 std::to_string(w) + " at " + warps_[w].op;
    }
    for (const SomeWarps& some : some_warps_) {
      if (some.arrived == 0) continue;
      waiting += " " + std::to_string(some.arrived) + " of " + std::to_string(some.threads) +
                 " threads at a barrier";
    }
    if (!waiting.empty()) abort("threads wait for others that never come:" + waiting);
    _longjmp(main_, 1);
  }

  const Launch& launch_;
  const int index_;
  GlobalMemory& global_;
  Report& report_;
  ConflictCounter conflicts_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  const std::function<void()>* kernel_ = nullptr;
  jmp_buf main_;
  int thread_ = 0;
  bool aborted_ = false;
  SomeWarps some_warps_[16];
  // The barrier of the block.
  int arrived_ = 0;
  const char* op_ = "";
  bool votes_ = false;
  bool result_ = false;
};

inline void abort_block(const std::string& message) { current->abort(message); }

inline void run(const Launch& launch, GlobalMemory& global, Report& report, ConflictCounts& counts,
                const std::function<void()>& kernel) {
  std::atomic<int> next{0};
  const int blocks = launch.grid_x * launch.grid_y;
  const auto work = [&] {
    const Stacks stacks(launch.threads);
    for (int index = next++; index < blocks; index = next++) {
      Block(launch, index, stacks, global, report, counts).run(kernel);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min(launch.workers, blocks); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mla_fp8kv::host
