// A fiber: a stack of its own and a way to switch to it. x86-64 by hand, elsewhere by ucontext (about 7 times slower).
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#if !defined(__x86_64__) || defined(EMULATOR_UCONTEXT)
#define EMULATOR_USES_UCONTEXT 1
#include <ucontext.h>
#endif

#ifdef EMULATOR_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif
#ifdef EMULATOR_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, std::size_t* size);
}
#endif

namespace emulator {

// Happens-before edges for ThreadSanitizer; nothing otherwise.
inline void publish([[maybe_unused]] void* address) {
#ifdef EMULATOR_TSAN
  __tsan_release(address);
#endif
}
inline void observe([[maybe_unused]] void* address) {
#ifdef EMULATOR_TSAN
  __tsan_acquire(address);
#endif
}

#ifndef EMULATOR_USES_UCONTEXT
// System V: the six callee-saved registers go on the old stack, then the stacks change places.
asm(R"(
.text
.type emulator_swap_stacks,@function
emulator_swap_stacks:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret
.size emulator_swap_stacks,.-emulator_swap_stacks
)");
extern "C" void emulator_swap_stacks(void** save_to, void* resume);
#endif

class Fiber {
 public:
  static constexpr std::size_t kStackBytes = 512 * 1024;

  // Makes the fiber start `entry` when it is switched to. Stacks are kept for the next block.
  void prepare(void (*entry)()) {
    if (stack_ == nullptr) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) std::abort();
      stack_ = static_cast<char*>(memory);
    }
#ifdef EMULATOR_USES_UCONTEXT
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#else
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes);
    *--top = nullptr;  // keeps the stack aligned as a call would
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    saved_ = top;
#endif
    fake_stack_ = nullptr;
#ifdef EMULATOR_TSAN
    if (tsan_ == nullptr) tsan_ = __tsan_create_fiber(0);
#endif
  }

  // The thread that runs the machine, as a fiber to come back to.
  void adopt_current() {
#ifdef EMULATOR_TSAN
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // Switches; the leaving fiber gets no happens-before edge from it. `ended`: it will not come back.
  void switch_to(Fiber& next, [[maybe_unused]] bool ended) {
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(next.tsan_, 1);
#endif
#ifdef EMULATOR_ASAN
    __sanitizer_start_switch_fiber(ended ? nullptr : &fake_stack_, next.stack_, next.stack_ != nullptr ? kStackBytes : 0);
#endif
#ifdef EMULATOR_USES_UCONTEXT
    swapcontext(&context_, &next.context_);
#else
    emulator_swap_stacks(&saved_, next.saved_);
#endif
    arrived();
  }

  // First thing on a fiber's own stack, and after each switch back.
  void arrived() {
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

 private:
  char* stack_ = nullptr;
  void* fake_stack_ = nullptr;
#ifdef EMULATOR_USES_UCONTEXT
  ucontext_t context_;
#else
  void* saved_ = nullptr;
#endif
#ifdef EMULATOR_TSAN
  void* tsan_ = nullptr;
#endif
};

}  // namespace emulator
