// Fiber: a call stack that is left and entered by hand, so that one host thread can hold all the
// threads of a GPU block. A switch costs a few nanoseconds on x86-64 (hand-written) and a system
// call elsewhere (ucontext). AddressSanitizer is told of each switch.
//
// FiberStacks owns the memory: one guard page below each stack, so that an overflow faults instead
// of writing over its neighbour. Used by one host thread at a time.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace attnd::emulator {

class FiberStacks {
 public:
  FiberStacks(int count, size_t bytes_each);  // bytes_each is rounded up to pages
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  std::byte* Bottom(int index) const { return memory_ + index * stride_ + guard_; }
  size_t bytes() const { return stride_ - guard_; }
  // Whether they serve `count` fibers of such stacks.
  bool Serve(int count, size_t bytes_each) const {
    return count <= count_ && bytes_each <= bytes();
  }

 private:
  const int count_;
  std::byte* memory_ = nullptr;
  size_t guard_ = 0, stride_ = 0, total_ = 0;
};

class Fiber {
 public:
  // A default Fiber stands for the stack that is running: the first switch away from it fills it.
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes this fiber begin at entry(argument) on its next Enter. `entry` never returns.
  void Reset(std::byte* stack_bottom, size_t stack_bytes, void (*entry)(void*), void* argument);

  // Leaves `from`, which is running, and continues `to`. Returns when another fiber switches back.
  static void Switch(Fiber& from, Fiber& to);

  // The first statement of every entry function.
  static void Entered();

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
  const void* bottom_ = nullptr;  // of the stack; learnt by AddressSanitizer for the first fiber
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace attnd::emulator
