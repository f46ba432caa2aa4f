// Shared memory that knows of each 4-byte word whether it is written or in flight, and who touched
// it when.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "report.h"

namespace mla_fp8kv::host {

// Not 0, so that an offset that forgot the base is out of bounds, and aligned to 128 as declared
// but to no more.
constexpr uint32_t kSharedBase = 1152;

// Vector clocks of the warps. Barriers are the only order between warps here (the kernels use no
// fences or flags), so they decide every race, whatever order the fibers run in.
class Clocks {
 public:
  explicit Clocks(int warps) : clock_(warps, 1), seen_(warps, std::vector<uint32_t>(warps, 0)) {}

  void sync_warp(int warp) { ++clock_[warp]; }
  void sync_block() {
    for (std::vector<uint32_t>& seen : seen_) seen = clock_;
    for (uint32_t& clock : clock_) ++clock;
  }
  // What is known at a barrier of some of the warps: of those that came, and by those.
  void arrive(int warp, std::vector<uint32_t>& known) {
    known.resize(clock_.size(), 0);
    learn(known, seen_[warp]);
    known[warp] = clock_[warp]++;
  }
  void leave(int warp, const std::vector<uint32_t>& known) { learn(seen_[warp], known); }

  uint32_t of(int thread) const { return clock_[thread / kLanes]; }
  // Did `thread` pass a barrier with `other` since that was at `clock`?
  bool ordered(int other, uint32_t clock, int thread) const {
    if (other == thread) return true;
    const int warp = thread / kLanes, other_warp = other / kLanes;
    return warp == other_warp ? clock < clock_[warp] : clock <= seen_[warp][other_warp];
  }

 private:
  static void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& more) {
    for (size_t i = 0; i < known.size(); ++i) known[i] = std::max(known[i], more[i]);
  }

  std::vector<uint32_t> clock_;
  std::vector<std::vector<uint32_t>> seen_;  // [warp][other warp]: its clock at the last barrier
};

// Addresses come back as pointers once bounds, alignment, state and races are checked.
class SharedMemory {
 public:
  SharedMemory(uint32_t bytes, int warps, Report& report)
      : clocks(warps),
        report_(report),
        warps_(warps),
        data_(bytes, kPoison),
        words_(bytes / 4),
        reads_(words_.size() * warps),
        published_(warps * kLanes, 0) {}

  Clocks clocks;

  const uint8_t* read(const char* op, uint32_t address, uint32_t bytes, int thread) {
    const uint8_t* p = pointer(op, address, bytes);
    for (uint32_t w = first_word(address); w < first_word(address) + bytes / 4; ++w) {
      check_state(op, w);
      check_writer(op, w, thread);
      note(read_of(w, thread), thread);
      words_[w].read_by = op;
    }
    return p;
  }

  uint8_t* write(const char* op, uint32_t address, uint32_t bytes, int thread) {
    uint8_t* p = pointer(op, address, bytes);
    for (uint32_t w = first_word(address); w < first_word(address) + bytes / 4; ++w) {
      begin_write(op, w, thread, kWritten);
    }
    return p;
  }

  // What the tensor core reads by itself, 4 bytes: their writer must have published them before the
  // barrier.
  const uint8_t* read_async(const char* op, uint32_t address, int thread) {
    const Word& w = words_[first_word(address)];
    const uint8_t* p = read(op, address, 4, thread);
    if (w.state == kWritten && published_[w.writer] == w.published) {
      report_.fault(std::string(op) + " reads what " + w.written_by + " wrote and did not publish");
    }
    return p;
  }
  void publish(int thread) { ++published_[thread]; }

  // The bytes are poison from begin_copy() to end_copy(), by the same thread. The write happens for
  // other threads when this one has waited for it.
  void begin_copy(const char* op, uint32_t address, uint32_t bytes, int thread) {
    uint8_t* p = pointer(op, address, bytes);
    for (uint32_t w = first_word(address); w < first_word(address) + bytes / 4; ++w) {
      begin_write(op, w, thread, kInFlight);
    }
    std::memset(p, kPoison, bytes);
  }
  // Zeros for a null source.
  void end_copy(const char* op, uint32_t address, uint32_t bytes, const void* src, int thread) {
    uint8_t* p = pointer(op, address, bytes);
    if (src != nullptr) {
      std::memcpy(p, src, bytes);
    } else {
      std::memset(p, 0, bytes);
    }
    for (uint32_t w = first_word(address); w < first_word(address) + bytes / 4; ++w) {
      stamp(op, w, thread, kWritten);
    }
  }

 private:
  enum State : uint8_t { kUnwritten, kInFlight, kWritten };
  static constexpr int16_t kSeveral = -1;

  struct Word {
    State state = kUnwritten;
    int16_t writer = 0;
    uint32_t clock = 0;      // of the writer's warp when it wrote; 0: never
    uint32_t published = 0;  // how often the writer had published by then
    const char* written_by = "";
    const char* read_by = "";
  };
  struct Touch {
    uint32_t clock = 0;  // of the warp, when it last touched the word; 0: never
    int16_t lane = 0;    // that did it, kSeveral if more than one in that same clock
  };

  static uint32_t first_word(uint32_t address) { return (address - kSharedBase) / 4; }
  Touch& read_of(uint32_t word, int thread) { return reads_[word * warps_ + thread / kLanes]; }

  uint8_t* pointer(const char* op, uint32_t address, uint32_t bytes) {
    if (address < kSharedBase || address - kSharedBase + bytes > data_.size()) {
      const int64_t offset = static_cast<int64_t>(address) - kSharedBase;
      abort_block(std::string(op) + " is out of shared memory: offset " + std::to_string(offset) +
                  " of " + std::to_string(data_.size()) + " bytes");
    }
    if (address % bytes != 0) abort_block(std::string(op) + " is misaligned in shared memory");
    return data_.data() + (address - kSharedBase);
  }

  // ---- notes
  void note(Touch& touch, int thread) const {
    const uint32_t clock = clocks.of(thread);
    const auto lane = static_cast<int16_t>(thread % kLanes);
    touch = {clock, touch.clock == clock && touch.lane != lane ? kSeveral : lane};
  }
  void stamp(const char* op, uint32_t word, int thread, State state) {
    Word& w = words_[word];
    w.state = state;
    w.writer = static_cast<int16_t>(thread);
    w.clock = clocks.of(thread);
    w.published = published_[thread];
    w.written_by = op;
  }
  void begin_write(const char* op, uint32_t word, int thread, State state) {
    check_writer(op, word, thread);
    check_readers(op, word, thread);
    if (words_[word].state == kInFlight) {
      report_.fault(std::string(op) + " writes where a cp.async is still in flight");
    }
    stamp(op, word, thread, state);
  }

  // ---- checks
  void check_state(const char* op, uint32_t word) {
    const State state = words_[word].state;
    if (state == kWritten) return;
    report_.fault(
        std::string(op) + " reads shared memory " +
        (state == kUnwritten ? "that nobody wrote" : "whose cp.async was not waited for"));
  }
  void check_writer(const char* op, uint32_t word, int thread) {
    const Word& w = words_[word];
    if (w.clock == 0 || clocks.ordered(w.writer, w.clock, thread)) return;
    race(op, w.written_by, w.writer / kLanes == thread / kLanes);
  }
  void check_readers(const char* op, uint32_t word, int thread) {
    for (int warp = 0; warp < warps_; ++warp) {
      const Touch& touch = read_of(word, warp * kLanes);
      if (!ordered(touch, warp, thread)) race(op, words_[word].read_by, warp == thread / kLanes);
    }
  }
  bool ordered(const Touch& touch, int warp, int thread) const {
    if (touch.clock == 0) return true;
    // Of several lanes at least one is not `thread`.
    const bool own = touch.lane == kSeveral && warp == thread / kLanes;
    const int lane = !own ? std::max<int>(touch.lane, 0) : (thread + 1) % kLanes;
    return clocks.ordered(warp * kLanes + lane, touch.clock, thread);
  }
  void race(const char* op, const char* other, bool one_warp) {
    report_.fault(std::string("race: ") + op + " and " + other + " of " +
                  (one_warp ? "two lanes of a warp" : "two warps") +
                  " touch the same shared bytes with no barrier between");
  }

  Report& report_;
  const int warps_;
  std::vector<uint8_t> data_;
  std::vector<Word> words_;
  std::vector<Touch> reads_;         // [word][warp]
  std::vector<uint32_t> published_;  // [thread]
};

}  // namespace mla_fp8kv::host
