// Lanes as fibers. A context is made with ucontext once and switched with _setjmp and _longjmp,
// which unlike swapcontext make no system call.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>

namespace mla_fp8kv::host {

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
  // Leaves the running context in `from`, which a _longjmp continues.
  __attribute__((noinline)) static void change(jmp_buf& from, Fiber& to) {
    if (_setjmp(from) == 0) to.resume();
  }
  [[noreturn]] void resume() {
    if (started_) _longjmp(context, 1);
    started_ = true;
    setcontext(&start_);
    std::abort();
  }
  jmp_buf context;

 private:
  ucontext_t start_;
  bool started_ = false;
};

// Stacks for as many fibers, each above pages that may not be touched.
class Stacks {
 public:
  explicit Stacks(int count) : bytes_(count * Fiber::kStackBytes) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<uint8_t*>(memory);
    for (int i = 0; i < count; ++i) mprotect(of(i), Fiber::kGuardBytes, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  uint8_t* of(int index) const { return memory_ + index * Fiber::kStackBytes; }

 private:
  size_t bytes_;
  uint8_t* memory_;
};

}  // namespace mla_fp8kv::host
