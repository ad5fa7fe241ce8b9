#include "tests/emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "base/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves what the System V ABI lets a callee own, swaps stacks, restores. rdi: where to keep the old
// stack pointer; rsi: the new one.
asm(R"(
.text
.globl attnd_emulator_switch_stack
.type attnd_emulator_switch_stack, @function
attnd_emulator_switch_stack:
  pushq %rbp
  pushq %rbx
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
  popq %rbx
  popq %rbp
  ret
.size attnd_emulator_switch_stack, .-attnd_emulator_switch_stack

.type attnd_emulator_start_fiber, @function
attnd_emulator_start_fiber:
  movq %r12, %rdi
  jmpq *%rbx
.size attnd_emulator_start_fiber, .-attnd_emulator_start_fiber
)");
extern "C" void attnd_emulator_switch_stack(void** from, void* to);
extern "C" void attnd_emulator_start_fiber() asm("attnd_emulator_start_fiber");
#endif

namespace attnd::emulator {
namespace {

size_t RoundUp(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

#if defined(__SANITIZE_ADDRESS__)
// The fiber left last: AddressSanitizer reports its stack to the one that is entered.
thread_local const void** left_bottom = nullptr;
thread_local size_t* left_bytes = nullptr;
#endif

}  // namespace

FiberStacks::FiberStacks(int count, size_t bytes_each) : count_(count) {
  guard_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  stride_ = guard_ + RoundUp(bytes_each, guard_);
  total_ = stride_ * count;
  void* memory = mmap(nullptr, total_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED) << total_ << " bytes of fiber stacks";
  memory_ = static_cast<std::byte*>(memory);
  for (int i = 0; i < count; ++i) {
    CHECK(mprotect(memory_ + i * stride_, guard_, PROT_NONE) == 0) << "guard page " << i;
  }
}

FiberStacks::~FiberStacks() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory_, total_);
#endif
  munmap(memory_, total_);
}

void Fiber::Reset(std::byte* stack_bottom, size_t stack_bytes, void (*entry)(void*),
                  void* argument) {
  bottom_ = stack_bottom;
  bytes_ = stack_bytes;
  fake_stack_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  // A fiber that was left for good kept its frames' red zones.
  __asan_unpoison_memory_region(stack_bottom, stack_bytes);
#endif
#if defined(__x86_64__)
  // At a function's first instruction the stack pointer is 8 above a multiple of 16: the slot left
  // free is where a return address would stand.
  auto* top = reinterpret_cast<void**>(stack_bottom + stack_bytes) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(&attnd_emulator_start_fiber);
  void* saved[6] = {nullptr, reinterpret_cast<void*>(entry), argument, nullptr, nullptr, nullptr};
  for (void* value : saved) *--top = value;  // rbp, rbx, r12, r13, r14, r15
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_bottom;
  context_.uc_stack.ss_size = stack_bytes;
  context_.uc_link = nullptr;
  auto bits = reinterpret_cast<uintptr_t>(argument);
  auto entry_bits = reinterpret_cast<uintptr_t>(entry);
  void (*start)(unsigned, unsigned, unsigned, unsigned) = [](unsigned a, unsigned b, unsigned c,
                                                             unsigned d) {
    auto join = [](unsigned high, unsigned low) {
      return static_cast<uintptr_t>(static_cast<uint64_t>(high) << 32 | low);
    };
    reinterpret_cast<void (*)(void*)>(join(a, b))(reinterpret_cast<void*>(join(c, d)));
  };
  makecontext(&context_, reinterpret_cast<void (*)()>(start), 4,
              static_cast<unsigned>(static_cast<uint64_t>(entry_bits) >> 32),
              static_cast<unsigned>(entry_bits),
              static_cast<unsigned>(static_cast<uint64_t>(bits) >> 32),
              static_cast<unsigned>(bits));
#endif
}

void Fiber::Switch(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  left_bottom = &from.bottom_;
  left_bytes = &from.bytes_;
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.bytes_);
#endif
#if defined(__x86_64__)
  attnd_emulator_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#else
  swapcontext(&from.context_, &to.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack_, left_bottom, left_bytes);
#endif
}

void Fiber::Entered() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, left_bottom, left_bytes);
#endif
}

}  // namespace attnd::emulator
