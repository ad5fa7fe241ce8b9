// Block: runs the threads of a GPU block on one host thread, each a fiber. Lanes of a warp wait for
// each other at warp-wide operations, threads of a block at barriers; between those a thread runs
// on alone, as Volta's threads may. Blocks of a grid run one after another in ascending order, so
// that a block may wait for what an earlier one publishes.
//
// A kernel that breaks the rules (see shared_memory.h, global_memory.h), or whose threads wait for
// what cannot come, ends the launch with INTERNAL: what, which thread, where in the source. The
// fibers are then abandoned: kernel code owns nothing that needs a destructor.
//
// The free functions below are for the host bodies of device instructions (kernels/ptx) and act for
// the running thread. One launch at a time per host thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tests/emulator/global_memory.h"
#include "tests/emulator/shared_memory.h"

namespace attnd::emulator {

using SourceLocation = std::source_location;

struct Dimensions {
  uint32_t x = 1, y = 1, z = 1;
};

// Where the running thread stands, as %tid and %ctaid would say.
struct Place {
  int thread = 0;  // in the block
  Dimensions block{0, 0, 0};
  std::byte* shared = nullptr;  // 1024-byte aligned
};

struct LaunchOptions {
  Dimensions grid;
  int threads = kWarpSize;  // per block, a multiple of 32
  int64_t shared_bytes = 0;
  GlobalMemory* memory = nullptr;  // null: global accesses are not checked
  SharedMemory::Options shared;
  int64_t stack_bytes = 64 << 10;  // per thread
  int64_t spin_limit = 1 << 16;    // polls in a row, nothing else happening, before giving up
};

struct LaunchReport {
  std::vector<BankReport> banks;  // if counted
  int64_t warp_operations = 0;    // shuffles, votes, matrix products
  int64_t barriers = 0;
};

using Kernel = std::function<void(const Place&)>;

absl::StatusOr<LaunchReport> Launch(const LaunchOptions& options, const Kernel& kernel);

// True while a kernel runs on this host thread.
bool InKernel();

// Lane of the running thread; its number in the block; where the block's shared memory begins.
int CurrentLane();
int CurrentThread();
std::byte* CurrentShared();

// Waits until each lane of `mask` has called this with the same `run`, `mask` and source line, then
// calls run(arguments, mask) once: arguments[lane] is what that lane gave. INTERNAL if a lane never
// comes.
using WarpOperation = void (*)(void* const* arguments, uint32_t mask);
void MeetInWarp(WarpOperation run, void* argument, uint32_t mask, const SourceLocation& where);

// A warp-level synchronisation that also orders shared memory.
void SynchroniseWarp(uint32_t mask, const SourceLocation& where);

// bar.sync id, threads (0: all that have not returned) and bar.arrive.
void WaitAtBarrier(int id, int threads, const SourceLocation& where);
void ArriveAtBarrier(int id, int threads, const SourceLocation& where);

// Checks an access of the running thread; ends the launch if it is illegal.
void CheckShared(const void* address, int bytes, Access access, const SourceLocation& where);
void CheckGlobal(const void* address, int bytes, Access access, const SourceLocation& where);

// cp.async: copies into shared memory that happen when their thread waits for them, as late as they
// may. `from` null: zeros. Groups are closed by CommitCopies; WaitForCopies leaves the last `left`
// of them under way.
void CopyLater(void* to, const void* from, int bytes, const SourceLocation& where);
void CommitCopies();
void WaitForCopies(int left, const SourceLocation& where);

// mbarrier: a barrier in shared memory at this address, whose phases end when `arrivals` threads
// have arrived and all bytes that they announced have come. Waiting returns at once unless the
// phase at hand has this parity.
void InitPhases(const void* barrier, int arrivals, const SourceLocation& where);
void ArriveAtPhase(const void* barrier, int64_t announced, const SourceLocation& where);
void WaitForPhase(const void* barrier, uint32_t parity, const SourceLocation& where);
// Announced bytes: like CopyLater, but they come when somebody waits for the phase.
void CopyInPhase(const void* barrier, void* to, const void* from, int bytes,
                 const SourceLocation& where);

// cp.reduce.async.bulk: what a thread does when it waits for it, as late as it may; groups as those
// of copies.
void AddLater(std::function<void()> sum);
void CommitSums();
void WaitForSums(int left);

// wgmma: what a warp does when it waits for it, as late as it may. DoLater by one lane, inside a
// WarpOperation; groups as those of copies, by all lanes.
void DoLater(std::function<void()> work);
void CommitWork(const SourceLocation& where);
void FinishWork(int left, const SourceLocation& where);

// One turn of a loop that polls memory: lets the others run.
void Poll(const SourceLocation& where);

// Ends the launch with INTERNAL.
[[noreturn]] void Fail(absl::string_view what, const SourceLocation& where);

}  // namespace attnd::emulator
