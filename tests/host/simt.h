// A thread block on the CPU: lanes are fibers, warp-collective operations and barriers are
// rendezvous points, and shared memory knows for each 4-byte word whether it is written, still in
// flight, and who touched it since when.
//
// What a GPU would do silently wrong is reported with the operations' names:
//   * out of bounds or misaligned shared and registered global memory;
//   * a read of shared memory never written, or whose cp.async was not waited for (the bytes are
//   0xff until then);
//   * two threads touching the same word, one writing, with no barrier between (also within a warp:
//   sync_warp);
//   * lanes of a warp, or warps of a block, that meet at different operations or never meet;
//   * bank conflicts, counted per operation.
// Barriers are the only order between warps here (the kernels use no named barriers, fences or
// flags), so a vector clock per warp decides every race exactly, whatever order the fibers happened
// to run in.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mla_fp8kv::host {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
// Not 0, so that an offset that forgot the base is out of bounds, and aligned to 128 as declared
// but to no more.
constexpr uint32_t kSharedBase = 1152;
constexpr uint8_t kPoison = 0xff;  // NaN as e4m3, e5m2, FP16, BF16 and FP32

// ---- what a launch found, shared by the blocks of the launch
class Report {
 public:
  void fault(const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (seen_.size() < 20) seen_.insert(message);
  }
  void conflicts(const std::map<std::string, std::array<int64_t, 2>>& counts) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [op, count] : counts) {
      conflicts_[op][0] += count[0];
      conflicts_[op][1] += count[1];
    }
  }
  std::string faults() const {
    std::string text;
    for (const std::string& message : seen_) text += message + "\n";
    return text;
  }
  // One line an operation: name, accesses of a warp, extra passes those took.
  std::string conflicts() const {
    std::string text;
    for (const auto& [op, count] : conflicts_) {
      text += op + " " + std::to_string(count[0]) + " " + std::to_string(count[1]) + "\n";
    }
    return text;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> seen_;
  std::map<std::string, std::array<int64_t, 2>> conflicts_;
};

// ---- global memory a launch may touch
struct Region {
  enum Use {
    kRead = 0,
    kFresh = 1,      // written by the kernel before: read only after wait_for_previous_kernel
    kWriteOnce = 2,  // each 4-byte word is written at most once in a launch
  };
  const char* name;
  const uint8_t* begin;
  uint64_t bytes;
  int use;
  std::unique_ptr<std::atomic<bool>[]> written;
};

class Global {
 public:
  void add(const char* name, const void* begin, uint64_t bytes, int use) {
    Region region{name, static_cast<const uint8_t*>(begin), bytes, use, nullptr};
    if (use & Region::kWriteOnce) region.written.reset(new std::atomic<bool>[bytes / 4 + 1]());
    regions_.push_back(std::move(region));
  }
  Region* find(const void* p, uint64_t bytes) {
    const auto* address = static_cast<const uint8_t*>(p);
    for (Region& region : regions_) {
      if (address >= region.begin && address + bytes <= region.begin + region.bytes) return &region;
    }
    return nullptr;
  }

 private:
  std::vector<Region> regions_;
};

// ---- fibers. A context is made with ucontext once and switched with _setjmp/_longjmp, which
// unlike swapcontext make no system call.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 << 10;
  static constexpr size_t kGuardBytes = 16 << 10;

  void prepare(uint8_t* stack, void (*entry)()) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack + kGuardBytes;
    start_.uc_stack.ss_size = kStackBytes - kGuardBytes;
    start_.uc_link = nullptr;
    makecontext(&start_, entry, 0);
    started_ = false;
  }
  __attribute__((noinline)) static void change(jmp_buf& from, Fiber& to) {
    if (_setjmp(from) == 0) to.resume();
  }
  [[noreturn]] void resume() {
    if (started_) _longjmp(context, 1);
    started_ = true;
    setcontext(&start_);
    __builtin_unreachable();
  }
  jmp_buf context;

 private:
  ucontext_t start_;
  bool started_ = false;
};

class StackPool {
 public:
  ~StackPool() {
    if (memory_) munmap(memory_, count_ * Fiber::kStackBytes);
  }
  uint8_t* stack(int index, int count) {
    if (count > count_) {
      if (memory_) munmap(memory_, count_ * Fiber::kStackBytes);
      memory_ =
          static_cast<uint8_t*>(mmap(nullptr, count * Fiber::kStackBytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (memory_ == MAP_FAILED) std::abort();
      count_ = count;
      for (int i = 0; i < count; ++i) {
        mprotect(memory_ + i * Fiber::kStackBytes, Fiber::kGuardBytes, PROT_NONE);
      }
    }
    return memory_ + index * Fiber::kStackBytes;
  }

 private:
  uint8_t* memory_ = nullptr;
  int count_ = 0;
};

class Block;
inline thread_local Block* current = nullptr;

struct LaunchShape {
  int grid_x, grid_y;
  int threads;
  uint32_t shared_bytes;
  bool reverse_warps = false;  // run the warps in the other order
  bool count_conflicts = false;
};

// ---- one thread block
class Block {
 public:
  Block(const LaunchShape& shape, Global& global, Report& report)
      : shape_(shape),
        global_(global),
        report_(report),
        num_warps_(shape.threads / kLanes),
        lanes_(shape.threads),
        warps_(num_warps_),
        data_(shape.shared_bytes),
        words_(shape.shared_bytes / 4),
        accesses_(static_cast<size_t>(num_warps_) * words_.size()) {}

  void run(int block_index, const std::function<void()>& kernel, StackPool& stacks) {
    block_index_ = block_index;
    kernel_ = &kernel;
    std::fill(data_.begin(), data_.end(), kPoison);
    std::fill(words_.begin(), words_.end(), Word{});
    std::fill(accesses_.begin(), accesses_.end(), Accesses{});
    for (int w = 0; w < num_warps_; ++w) {
      warps_[w] = Warp{};
      warps_[w].seen.assign(num_warps_, 0);
    }
    for (int i = 0; i < shape_.threads; ++i) {
      lanes_[i] = Lane{};
      lanes_[i].fiber.prepare(stacks.stack(i, shape_.threads), &Block::enter);
    }
    block_arrived_ = 0;
    aborted_ = false;
    current = this;
    thread_ = shape_.reverse_warps ? shape_.threads - kLanes : 0;
    Fiber::change(main_, lanes_[thread_].fiber);
    current = nullptr;
    if (!waited_for_previous() && !aborted_) {
      fault("a block exits and never called wait_for_previous_kernel");
    }
    flush_conflicts();
  }

  // ---- for the wrappers
  int thread() const { return thread_; }
  int block_x() const { return block_index_ % shape_.grid_x; }
  int block_y() const { return block_index_ / shape_.grid_x; }
  const LaunchShape& shape() const { return shape_; }

  void fault(const std::string& message) { report_.fault(message); }
  // For what cannot go on: ends the block.
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
      abort(where() + ": " + op + " meets " + warp.op + " of other lanes of the warp");
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
      ++block.warps_[first / kLanes].clock;
    });
  }

  bool sync_block(const char* op, bool vote) {
    if (block_arrived_ > 0 && std::strcmp(block_op_, op) != 0) {
      abort(where() + ": " + op + " meets " + block_op_ + " of other threads");
    }
    block_op_ = op;
    block_votes_ = block_arrived_ == 0 ? vote : block_votes_ || vote;
    if (++block_arrived_ < shape_.threads) {
      wait_turn();
    } else {
      block_arrived_ = 0;
      block_result_ = block_votes_;
      for (Warp& warp : warps_) {
        for (int other = 0; other < num_warps_; ++other) warp.seen[other] = warps_[other].clock;
        warp.runnable = kAllLanes;
      }
      for (Warp& warp : warps_) ++warp.clock;
    }
    return block_result_;
  }

  // ---- shared memory; the address comes back as a pointer once bounds, alignment, state and races
  // are checked
  uint8_t* read_shared(const char* op, uint32_t address, uint32_t bytes, int thread) {
    uint8_t* p = shared_pointer(op, address, bytes, thread);
    for (uint32_t w = word_index(address); w < word_index(address + bytes); ++w)
      check_read(op, w, thread);
    return p;
  }
  uint8_t* write_shared(const char* op, uint32_t address, uint32_t bytes, int thread) {
    uint8_t* p = shared_pointer(op, address, bytes, thread);
    for (uint32_t w = word_index(address); w < word_index(address + bytes); ++w) {
      check_write(op, w, thread, kWritten);
    }
    return p;
  }
  // An atomic read-modify-write whose result nobody gets: atomics do not race with each other.
  uint8_t* update_shared(const char* op, uint32_t address, int thread) {
    uint8_t* p = shared_pointer(op, address, 4, thread);
    const uint32_t w = word_index(address);
    check_state(op, w);
    check_writer(op, w, thread);
    check_readers(op, w, thread);
    Touch& mine = accesses_of(thread, w).atomic;
    mine = merged(mine, thread);
    words_[w].updated_by = op;
    return p;
  }

  // ---- cp.async
  void issue_copy(const char* op, uint32_t dst, const void* src, bool valid) {
    uint8_t* p = shared_pointer(op, dst, 16, thread_);
    for (uint32_t w = word_index(dst); w < word_index(dst + 16); ++w) {
      check_write(op, w, thread_, kInFlight);
    }
    std::memset(p, kPoison, 16);
    if (valid) read_global(op, src, 16);
    lanes_[thread_].copies.push_back({dst, valid ? src : nullptr});
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
    for (size_t i = 0; i < count; ++i) land(lane.copies[i]);
    lane.copies.erase(lane.copies.begin(), lane.copies.begin() + count);
    lane.group_ends.erase(lane.group_ends.begin(), lane.group_ends.begin() + groups);
    for (size_t& end : lane.group_ends) end -= count;
  }

  // ---- global memory
  void read_global(const char* op, const void* p, uint32_t bytes) {
    const Region* region = checked_region(op, p, bytes);
    if ((region->use & Region::kFresh) && !lanes_[thread_].waited) {
      fault(std::string(op) + " reads " + region->name + " before wait_for_previous_kernel");
    }
  }
  void write_global(const char* op, void* p, uint32_t bytes) {
    Region* region = checked_region(op, p, bytes);
    if (!region->written)
      abort(std::string(op) + " writes " + region->name + ", which is read-only");
    if (!lanes_[thread_].waited) {
      fault(std::string(op) + " writes " + region->name + " before wait_for_previous_kernel");
    }
    const uint64_t offset = static_cast<uint8_t*>(p) - region->begin;
    for (uint64_t word = offset / 4; word < (offset + bytes + 3) / 4; ++word) {
      if (region->written[word].exchange(true)) {
        fault(std::string(op) + " writes " + region->name + " a second time");
      }
    }
  }
  void wait_for_previous_kernel() { lanes_[thread_].waited = true; }

  // ---- bank conflicts: the n-th execution of one instruction by the lanes of a warp is one access
  void count_access(const char* op, const void* site, uint32_t address, uint32_t bytes) {
    if (!shape_.count_conflicts) return;
    const auto key = std::make_pair(site, lanes_[thread_].executions[site]++);
    WarpAccess& access = warps_[thread_ / kLanes].accesses[key];
    access.op = op;
    access.bytes = bytes;
    access.lanes |= 1u << (thread_ % kLanes);
    access.addresses[thread_ % kLanes] = address;
    if (access.lanes == kAllLanes) {
      count_passes(access);
      warps_[thread_ / kLanes].accesses.erase(key);
    }
  }
  struct WarpAccess {
    const char* op;
    uint32_t bytes;
    uint32_t lanes;
    uint32_t addresses[kLanes];
  };
  // Lanes go in phases of 128 bytes; a phase takes as many passes as its busiest bank has different
  // words.
  void count_passes(const WarpAccess& access) {
    if (!shape_.count_conflicts) return;
    std::array<int64_t, 2>& count = conflicts_[access.op];
    ++count[0];
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
      count[1] += static_cast<int64_t>(passes) - 1;
    }
  }

 private:
  enum State : uint8_t { kUnwritten, kInFlight, kWritten };
  static constexpr int16_t kSeveral = -1;

  // When a warp touched a word: its clock then (0: never) and the lane, or kSeveral in that same
  // clock.
  struct Touch {
    uint32_t clock = 0;
    int16_t lane = 0;
  };
  struct Accesses {  // of one warp
    Touch read, atomic;
  };
  struct Word {
    State state = kUnwritten;
    int16_t writer = 0;
    uint32_t clock = 0;
    const char* written_by = "";
    const char* read_by = "";
    const char* updated_by = nullptr;
  };
  struct Copy {
    uint32_t dst;
    const void* src;
  };
  struct Lane {
    Fiber fiber;
    bool waited = false;
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
    std::map<const void*, int> executions;
  };
  struct Warp {
    uint32_t runnable = kAllLanes;
    uint32_t arrived = 0;
    const char* op = "";
    void* args[kLanes];
    uint32_t clock = 1;
    std::vector<uint32_t> seen;  // other warps' clocks at the last barrier with them
    std::map<std::pair<const void*, int>, WarpAccess> accesses;
  };

  // ---- turns
  static void enter() {
    Block& block = *current;
    (*block.kernel_)();
    block.finish();
  }
  void finish() {
    const int next = next_runnable();
    if (next < 0) {
      for (const Warp& warp : warps_) {
        if (warp.arrived) abort(stuck());
      }
      if (block_arrived_ > 0) abort(stuck());
      _longjmp(main_, 1);
    }
    thread_ = next;
    lanes_[next].fiber.resume();
  }
  void wait_turn() {
    const int me = thread_;
    const int next = next_runnable();
    if (next < 0) abort(stuck());
    thread_ = next;
    Fiber::change(lanes_[me].fiber.context, lanes_[next].fiber);
  }
  // Takes the running lane off the list; the next one is of the same warp if any can run.
  int next_runnable() {
    const int warp = thread_ / kLanes;
    warps_[warp].runnable &= ~(1u << (thread_ % kLanes));
    for (int i = 0; i < num_warps_; ++i) {
      const int step = shape_.reverse_warps ? num_warps_ - i : i;
      const int candidate = (warp + step) % num_warps_;
      if (const uint32_t runnable = warps_[candidate].runnable) {
        return candidate * kLanes + __builtin_ctz(runnable);
      }
    }
    return -1;
  }
  std::string where() const {
    return "block " + std::to_string(block_index_) + " thread " + std::to_string(thread_);
  }
  std::string stuck() const {
    std::string text = "threads wait for others that never come:";
    if (block_arrived_ > 0) {
      text += " " + std::to_string(block_arrived_) + " of " + std::to_string(shape_.threads) +
              " threads at " + block_op_;
    }
    for (int w = 0; w < num_warps_; ++w) {
      if (warps_[w].arrived == 0) continue;
      text += " " + std::to_string(__builtin_popcount(warps_[w].arrived)) + " lanes of warp " +
              std::to_string(w) + " at " + warps_[w].op;
    }
    return text;
  }
  bool waited_for_previous() const {
    return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.waited; });
  }

  // ---- memory checks
  static uint32_t word_index(uint32_t address) { return (address - kSharedBase) / 4; }
  uint8_t* shared_pointer(const char* op, uint32_t address, uint32_t bytes, int thread) {
    if (address < kSharedBase || address - kSharedBase + bytes > shape_.shared_bytes) {
      abort(std::string(op) + " is out of shared memory: offset " +
            std::to_string(static_cast<int64_t>(address) - kSharedBase) + " of " +
            std::to_string(shape_.shared_bytes) + " bytes, thread " + std::to_string(thread));
    }
    if (address % bytes != 0) abort(std::string(op) + " is misaligned in shared memory");
    return data_.data() + (address - kSharedBase);
  }
  Region* checked_region(const char* op, const void* p, uint32_t bytes) {
    Region* region = global_.find(p, bytes);
    if (region == nullptr) {
      abort(std::string(op) + " is outside of every global buffer, " + where());
    }
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
      abort(std::string(op) + " is misaligned in " + region->name);
    }
    return region;
  }
  Accesses& accesses_of(int thread, uint32_t word) {
    return accesses_[static_cast<size_t>(word) * num_warps_ + thread / kLanes];
  }
  // Did `thread` pass a barrier since thread `other` was at `clock`?
  bool ordered(int other, uint32_t clock, int thread) const {
    const Warp& warp = warps_[thread / kLanes];
    if (other / kLanes == thread / kLanes) return other == thread || clock < warp.clock;
    return clock <= warp.seen[other / kLanes];
  }
  bool ordered(const Touch& touch, int warp, int thread) const {
    if (touch.clock == 0) return true;
    if (touch.lane == kSeveral && warp == thread / kLanes) return touch.clock < warps_[warp].clock;
    return ordered(warp * kLanes + std::max<int>(touch.lane, 0), touch.clock, thread);
  }
  Touch merged(const Touch& touch, int thread) const {
    const uint32_t clock = warps_[thread / kLanes].clock;
    const auto lane = static_cast<int16_t>(thread % kLanes);
    return {clock, touch.clock == clock && touch.lane != lane ? kSeveral : lane};
  }
  void race(const char* op, const char* other, bool one_warp) {
    fault(std::string("race: ") + op + " and " + other + " of " +
          (one_warp ? "two lanes of a warp" : "two warps") +
          " touch the same shared bytes with no barrier between");
  }
  void check_state(const char* op, uint32_t word) {
    if (words_[word].state == kWritten) return;
    fault(std::string(op) + " reads shared memory " +
          (words_[word].state == kUnwritten ? "that nobody wrote"
                                            : "whose cp.async was not waited for"));
  }
  void check_writer(const char* op, uint32_t word, int thread) {
    const Word& w = words_[word];
    if (w.clock == 0 || ordered(w.writer, w.clock, thread)) return;
    race(op, w.written_by, w.writer / kLanes == thread / kLanes);
  }
  void check_readers(const char* op, uint32_t word, int thread) {
    for (int warp = 0; warp < num_warps_; ++warp) {
      if (ordered(accesses_of(warp * kLanes, word).read, warp, thread)) continue;
      race(op, words_[word].read_by, warp == thread / kLanes);
    }
  }
  void check_atomics(const char* op, uint32_t word, int thread) {
    if (words_[word].updated_by == nullptr) return;
    for (int warp = 0; warp < num_warps_; ++warp) {
      if (ordered(accesses_of(warp * kLanes, word).atomic, warp, thread)) continue;
      race(op, words_[word].updated_by, warp == thread / kLanes);
    }
  }
  void check_read(const char* op, uint32_t word, int thread) {
    check_state(op, word);
    check_writer(op, word, thread);
    check_atomics(op, word, thread);
    Touch& mine = accesses_of(thread, word).read;
    mine = merged(mine, thread);
    words_[word].read_by = op;
  }
  void check_write(const char* op, uint32_t word, int thread, State state) {
    check_writer(op, word, thread);
    check_readers(op, word, thread);
    check_atomics(op, word, thread);
    Word& w = words_[word];
    if (w.state == kInFlight)
      fault(std::string(op) + " writes where a cp.async is still in flight");
    w.state = state;
    stamp(w, op, thread);
  }
  void stamp(Word& word, const char* op, int thread) {
    word.writer = static_cast<int16_t>(thread);
    word.clock = warps_[thread / kLanes].clock;
    word.written_by = op;
  }
  // The write happens for the others when its thread has waited, so it is stamped again.
  void land(const Copy& copy) {
    uint8_t* p = data_.data() + (copy.dst - kSharedBase);
    if (copy.src) {
      std::memcpy(p, copy.src, 16);
    } else {
      std::memset(p, 0, 16);
    }
    for (uint32_t w = word_index(copy.dst); w < word_index(copy.dst + 16); ++w) {
      words_[w].state = kWritten;
      stamp(words_[w], "cp.async", thread_);
    }
  }
  // What did not find all its lanes: predicated accesses.
  void flush_conflicts() {
    for (Warp& warp : warps_) {
      for (const auto& [site, access] : warp.accesses) count_passes(access);
    }
    report_.conflicts(conflicts_);
    conflicts_.clear();
  }

  const LaunchShape shape_;
  Global& global_;
  Report& report_;
  const int num_warps_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  std::vector<uint8_t> data_;
  std::vector<Word> words_;
  std::vector<Accesses> accesses_;  // [word][warp]
  std::map<std::string, std::array<int64_t, 2>> conflicts_;
  const std::function<void()>* kernel_ = nullptr;
  jmp_buf main_;
  int block_index_ = 0;
  int thread_ = 0;
  int block_arrived_ = 0;
  const char* block_op_ = "";
  bool block_votes_ = false;
  bool block_result_ = false;
  bool aborted_ = false;
};

// Runs the blocks of a launch on `workers` threads of the CPU.
inline void launch(const LaunchShape& shape, Global& global, Report& report, int workers,
                   const std::function<void()>& kernel) {
  std::atomic<int> next{0};
  const int blocks = shape.grid_x * shape.grid_y;
  const auto work = [&] {
    StackPool stacks;
    Block block(shape, global, report);
    for (int index = next++; index < blocks; index = next++) block.run(index, kernel, stacks);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min(workers, blocks); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mla_fp8kv::host
