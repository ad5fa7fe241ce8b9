#include "tests/emulator/block.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "tests/emulator/deferred_work.h"
#include "tests/emulator/fiber.h"

namespace attnd::emulator {
namespace {

enum class State : uint8_t { kRunnable, kInWarp, kAtBarrier, kAtPhase, kReturned };

// A copy into shared memory that its thread has not waited for.
struct Copy {
  std::byte* to;
  const void* from;  // null: zeros
  int bytes;
  int64_t group;
};

struct Lane {
  Fiber fiber;
  State state = State::kRunnable;
  Place place;
  std::deque<Copy> copies;
  int64_t group = 0;  // of copies, the open one
  DeferredWork sums;
  // The lane waits for this.
  WarpOperation operation = nullptr;
  void* argument = nullptr;
  uint32_t mask = 0;
  int barrier = 0;
  SourceLocation where;
};

struct Warp {
  uint32_t runnable = 0;  // lanes
  uint32_t waiting = 0;   // lanes inside MeetInWarp
  uint32_t returned = 0;
  DeferredWork work = {};
};

struct Barrier {
  int arrived = 0;   // threads
  int expected = 0;  // 0: all that have not returned
  uint32_t arrived_lanes[kMaxWarps] = {};
  std::vector<int> waiting;  // threads
};

// A barrier in shared memory.
struct Phases {
  int arrivals = 0, left = 0;  // of a phase; of the one at hand
  int64_t announced = 0;       // bytes that it waits for, less those of `copies`
  uint32_t ended = 0;          // phases
  std::vector<Copy> copies;
  SharedMemory::Clocks released, ended_with;  // in the phase at hand; in the last one
  std::vector<int> waiting;                   // threads
};

std::string Describe(const SourceLocation& where) {
  absl::string_view file = where.file_name();
  return absl::StrCat(file.substr(file.find_last_of('/') + 1), ":", where.line());
}

// "0-31, 64" for a sorted list.
std::string Ranges(const std::vector<int>& threads) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < threads.size();) {
    size_t last = i;
    while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
    parts.push_back(i == last ? absl::StrCat(threads[i])
                              : absl::StrCat(threads[i], "-", threads[last]));
    i = last + 1;
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

// The state of one launch on one host thread.
class Block {
 public:
  Block(const LaunchOptions& options, const Kernel& kernel);

  absl::Status Run(Dimensions block);
  LaunchReport Finish();

  Lane& current() { return lanes_[current_]; }
  int current_thread() const { return current_; }

  void MeetInWarp(WarpOperation run, void* argument, uint32_t mask, const SourceLocation& where);
  void SynchroniseWarp(uint32_t mask, const SourceLocation& where);
  void ArriveAtBarrier(int id, int threads, bool wait, const SourceLocation& where);
  void CheckShared(const void* address, int bytes, Access access, const SourceLocation& where);
  void CheckGlobal(const void* address, int bytes, Access access, const SourceLocation& where);
  void CopyLater(void* to, const void* from, int bytes, const SourceLocation& where);
  void CommitCopies() { ++current().group; }
  void WaitForCopies(int left, const SourceLocation& where);
  void InitPhases(const void* barrier, int arrivals, const SourceLocation& where);
  void ArriveAtPhase(const void* barrier, int64_t announced, const SourceLocation& where);
  void WaitForPhase(const void* barrier, uint32_t parity, const SourceLocation& where);
  void CopyInPhase(const void* barrier, void* to, const void* from, int bytes,
                   const SourceLocation& where);
  DeferredWork& sums() { return current().sums; }         // of the thread
  DeferredWork& work() { return WarpOf(current_).work; }  // of its warp
  void Poll(const SourceLocation& where);
  [[noreturn]] void Fail(absl::string_view what, const SourceLocation& where);

 private:
  static void LaneMain(void* lane);
  void Return();
  bool EveryLaneIsHere(const Lane& lane, const Warp& warp) const;
  void Wake(int thread);
  void OpenIfComplete(int id);
  void SwitchAway();
  void SwitchTo(int thread);
  int NextRunnable() const;
  std::string Deadlock() const;
  void CheckBarrierUse(int id, int threads, const SourceLocation& where);
  Phases& PhasesAt(const void* barrier, const SourceLocation& where);
  void EndPhaseIfComplete(Phases& phases);
  void Finish(const Copy& copy);

  Warp& WarpOf(int thread) { return warps_[thread / kWarpSize]; }

  const LaunchOptions options_;
  const Kernel& kernel_;
  const FiberStacks& stacks_;
  SharedMemory shared_;
  Fiber host_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  Barrier barriers_[kBarriers];
  std::map<const void*, Phases> phases_;
  int current_ = 0;
  int live_ = 0;  // threads that have not returned
  int64_t polls_ = 0;
  std::string wrong_;  // what Fail is about to say: a string on an abandoned stack would leak
  std::string failure_;
  LaunchReport report_;
};

namespace {
constinit thread_local Block* running = nullptr;

// Keeps this host thread's stacks from one launch to the next: to map and guard stacks takes longer
// than many a small launch.
const FiberStacks& StacksOf(const LaunchOptions& options) {
  thread_local std::unique_ptr<FiberStacks> stacks;
  const auto bytes = static_cast<size_t>(options.stack_bytes);
  if (stacks == nullptr || !stacks->Serve(options.threads, bytes)) {
    stacks = std::make_unique<FiberStacks>(options.threads, bytes);
  }
  return *stacks;
}
}  // namespace

Block::Block(const LaunchOptions& options, const Kernel& kernel)
    : options_(options),
      kernel_(kernel),
      stacks_(StacksOf(options)),
      shared_(options.shared_bytes, options.threads / kWarpSize, options.shared),
      lanes_(options.threads),
      warps_(options.threads / kWarpSize) {}

absl::Status Block::Run(Dimensions block) {
  shared_.BeginBlock();
  for (Barrier& barrier : barriers_) barrier = Barrier();
  phases_.clear();
  for (int thread = 0; thread < options_.threads; ++thread) {
    Lane& lane = lanes_[thread];
    lane.state = State::kRunnable;
    lane.place = {thread, block, shared_.data()};
    lane.copies.clear();
    lane.group = 0;
    lane.sums = {};
    lane.fiber.Reset(stacks_.Bottom(thread), stacks_.bytes(), &Block::LaneMain, &lane);
  }
  for (Warp& warp : warps_) warp = Warp{.runnable = ~0u};
  live_ = options_.threads;
  polls_ = 0;
  current_ = 0;
  Fiber::Switch(host_, lanes_[0].fiber);
  if (failure_.empty()) {
    shared_.EndBlock();
    return absl::OkStatus();
  }
  return absl::InternalError(
      absl::StrCat("block (", block.x, ", ", block.y, ", ", block.z, "): ", failure_));
}

LaunchReport Block::Finish() {
  report_.banks = shared_.reports();
  return std::move(report_);
}

void Block::LaneMain(void* argument) {
  Fiber::Entered();
  Block& block = *running;
  block.kernel_(static_cast<Lane*>(argument)->place);
  block.Return();
}

void Block::Return() {
  if (!current().sums.empty()) Fail("returns before its sums are done", current().where);
  Warp& warp = WarpOf(current_);
  uint32_t bit = 1u << current_ % kWarpSize;
  current().state = State::kReturned;
  warp.runnable &= ~bit;
  warp.returned |= bit;
  --live_;
  polls_ = 0;
  for (int id = 0; id < kBarriers; ++id) OpenIfComplete(id);
  SwitchAway();
  CHECK(false) << "a thread that returned was continued";
}

bool Block::EveryLaneIsHere(const Lane& lane, const Warp& warp) const {
  if ((warp.waiting & lane.mask) != lane.mask) return false;
  int first = current_ - current_ % kWarpSize;
  for (uint32_t rest = lane.mask; rest != 0; rest &= rest - 1) {
    const Lane& other = lanes_[first + std::countr_zero(rest)];
    if (other.operation != lane.operation || other.mask != lane.mask ||
        other.where.line() != lane.where.line() ||
        other.where.file_name() != lane.where.file_name()) {
      return false;
    }
  }
  return true;
}

void Block::MeetInWarp(WarpOperation run, void* argument, uint32_t mask,
                       const SourceLocation& where) {
  Warp& warp = WarpOf(current_);
  Lane& lane = current();
  uint32_t bit = 1u << current_ % kWarpSize;
  if (!(mask & bit)) Fail("the mask of a warp operation leaves out its own lane", where);
  lane.operation = run;
  lane.argument = argument;
  lane.mask = mask;
  lane.where = where;
  lane.state = State::kInWarp;
  warp.waiting |= bit;
  warp.runnable &= ~bit;
  if (!EveryLaneIsHere(lane, warp)) {
    SwitchAway();
    return;
  }
  void* arguments[kWarpSize] = {};
  int first = current_ - current_ % kWarpSize;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    Lane& other = lanes_[first + std::countr_zero(rest)];
    arguments[std::countr_zero(rest)] = other.argument;
    other.state = State::kRunnable;
  }
  warp.waiting &= ~mask;
  warp.runnable |= mask;
  run(arguments, mask);
  ++report_.warp_operations;
  polls_ = 0;
}

void Block::SynchroniseWarp(uint32_t mask, const SourceLocation& where) {
  MeetInWarp([](void* const*,
                uint32_t) { running->shared_.WarpSynchronised(running->current_ / kWarpSize); },
             nullptr, mask, where);
}

void Block::CheckBarrierUse(int id, int threads, const SourceLocation& where) {
  wrong_.clear();
  if (id < 0 || id >= kBarriers) {
    wrong_ = absl::StrCat("barrier ", id, " of ", kBarriers);
  } else if (threads % kWarpSize != 0 || threads > options_.threads) {
    wrong_ = absl::StrCat("barrier ", id, " for ", threads, " of ", options_.threads, " threads");
  } else if (const Barrier& b = barriers_[id]; b.arrived > 0 && b.expected != threads) {
    wrong_ = absl::StrCat("barrier ", id, " is awaited for ", threads, " threads here and for ",
                          b.expected, " by a thread before");
  } else if (b.arrived_lanes[current_ / kWarpSize] >> current_ % kWarpSize & 1) {
    wrong_ = absl::StrCat("arrived twice at barrier ", id, " before it opened");
  }
  if (!wrong_.empty()) Fail(wrong_, where);
}

void Block::ArriveAtBarrier(int id, int threads, bool wait, const SourceLocation& where) {
  CheckBarrierUse(id, threads, where);
  Barrier& barrier = barriers_[id];
  int warp = current_ / kWarpSize;
  uint32_t bit = 1u << current_ % kWarpSize;
  barrier.expected = threads;
  ++barrier.arrived;
  barrier.arrived_lanes[warp] |= bit;
  if ((barrier.arrived_lanes[warp] | warps_[warp].returned) == ~0u) {
    shared_.ArriveAtBarrier(id, warp);
  }
  if (wait) {
    barrier.waiting.push_back(current_);
    current().state = State::kAtBarrier;
    current().barrier = id;
    current().where = where;
    warps_[warp].runnable &= ~bit;
  }
  OpenIfComplete(id);
  if (current().state == State::kAtBarrier) SwitchAway();
}

void Block::OpenIfComplete(int id) {
  Barrier& barrier = barriers_[id];
  if (barrier.arrived == 0) return;
  if (barrier.arrived < (barrier.expected == 0 ? live_ : barrier.expected)) return;
  std::vector<int> waiting = std::move(barrier.waiting);
  barrier = Barrier();
  int last_warp = -1;
  for (int thread : waiting) {
    if (thread / kWarpSize != last_warp) shared_.PassBarrier(id, last_warp = thread / kWarpSize);
    Wake(thread);
  }
  shared_.ResetBarrier(id);
  ++report_.barriers;
  polls_ = 0;
}

void Block::Wake(int thread) {
  lanes_[thread].state = State::kRunnable;
  WarpOf(thread).runnable |= 1u << thread % kWarpSize;
}

int Block::NextRunnable() const {
  int warp = current_ / kWarpSize, lane = current_ % kWarpSize;
  if (uint32_t lanes = warps_[warp].runnable; lanes != 0) {
    return warp * kWarpSize + (lane + 1 + std::countr_zero(std::rotr(lanes, lane + 1))) % kWarpSize;
  }
  int count = static_cast<int>(warps_.size());
  for (int step = 1; step < count; ++step) {
    int other = (warp + step) % count;
    if (warps_[other].runnable != 0) {
      return other * kWarpSize + std::countr_zero(warps_[other].runnable);
    }
  }
  return -1;
}

void Block::SwitchAway() {
  int next = NextRunnable();
  if (next >= 0) return SwitchTo(next);
  if (live_ != 0) failure_ = Deadlock();
  Fiber::Switch(current().fiber, host_);
}

void Block::SwitchTo(int thread) {
  if (thread == current_) return;
  Lane& from = current();
  current_ = thread;
  Fiber::Switch(from.fiber, lanes_[thread].fiber);
}

void Block::Poll(const SourceLocation& where) {
  if (++polls_ > options_.spin_limit) {
    Fail("polls memory that nobody changes; the others have returned or wait", where);
  }
  int next = NextRunnable();
  // The poller's own warp first, then others: every runnable thread comes by in turn.
  int count = static_cast<int>(warps_.size()), warp = current_ / kWarpSize;
  for (int step = 1; step < count; ++step) {
    int other = (warp + step) % count;
    if (warps_[other].runnable != 0) {
      next = other * kWarpSize + std::countr_zero(warps_[other].runnable);
      break;
    }
  }
  SwitchTo(next);
}

std::string Block::Deadlock() const {
  std::map<std::string, std::vector<int>> groups;
  for (const Lane& lane : lanes_) {
    std::string what;
    if (lane.state == State::kReturned) {
      what = "have returned";
    } else if (lane.state == State::kAtBarrier) {
      const Barrier& barrier = barriers_[lane.barrier];
      what = absl::StrCat("wait at barrier ", lane.barrier, " (", barrier.arrived, " of ",
                          barrier.expected == 0 ? live_ : barrier.expected, " arrived, ",
                          Describe(lane.where), ")");
    } else if (lane.state == State::kAtPhase) {
      what = absl::StrCat("wait for a phase (", Describe(lane.where), ")");
    } else {
      what = absl::StrCat("wait for lanes ", absl::Hex(lane.mask, absl::kZeroPad8),
                          " of their warp at ", Describe(lane.where));
    }
    groups[what].push_back(lane.place.thread);
  }
  std::vector<std::string> parts;
  for (const auto& [what, threads] : groups) {
    parts.push_back(absl::StrCat("threads ", Ranges(threads), " ", what));
  }
  return absl::StrCat("deadlock: ", absl::StrJoin(parts, "; "));
}

void Block::CheckShared(const void* address, int bytes, Access access,
                        const SourceLocation& where) {
  wrong_ = shared_.Check(address, bytes, access, current_, where);
  if (!wrong_.empty()) [[unlikely]]
    Fail(wrong_, where);
}

void Block::CheckGlobal(const void* address, int bytes, Access access,
                        const SourceLocation& where) {
  if (options_.memory == nullptr) return;
  wrong_ = options_.memory->Check(address, bytes, access);
  if (!wrong_.empty()) [[unlikely]]
    Fail(wrong_, where);
}

void Block::CopyLater(void* to, const void* from, int bytes, const SourceLocation& where) {
  CheckShared(to, bytes, Access::kStore, where);
  if (from != nullptr) CheckGlobal(from, bytes, Access::kLoad, where);
  shared_.BeginCopy(to, bytes);
  current().copies.push_back({static_cast<std::byte*>(to), from, bytes, current().group});
}

void Block::WaitForCopies(int left, const SourceLocation& where) {
  std::deque<Copy>& copies = current().copies;
  while (!copies.empty() && copies.front().group < current().group - left) {
    const Copy copy = copies.front();
    copies.pop_front();
    Finish(copy);
    CheckShared(copy.to, copy.bytes, Access::kStore, where);
  }
}

void Block::Finish(const Copy& copy) {
  shared_.EndCopy(copy.to, copy.bytes);
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, static_cast<size_t>(copy.bytes));
  } else {
    std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  }
}

void Block::InitPhases(const void* barrier, int arrivals, const SourceLocation& where) {
  if (arrivals <= 0) Fail("a barrier in shared memory that nobody arrives at", where);
  if (phases_.contains(barrier)) Fail("a barrier in shared memory is made twice", where);
  Phases& phases = phases_[barrier];
  phases.arrivals = phases.left = arrivals;
}

Phases& Block::PhasesAt(const void* barrier, const SourceLocation& where) {
  auto found = phases_.find(barrier);
  if (found == phases_.end()) Fail("no barrier was made at this address", where);
  return found->second;
}

void Block::ArriveAtPhase(const void* barrier, int64_t announced, const SourceLocation& where) {
  Phases& phases = PhasesAt(barrier, where);
  // The phase before ends at last.
  if (phases.left == 0) EndPhaseIfComplete(phases);
  if (phases.left == 0)
    Fail("arrives at a phase whose arrivals and bytes are not all there", where);
  --phases.left;
  phases.announced += announced;
  shared_.Release(current_ / kWarpSize, phases.released);
  if (phases.copies.empty() || !phases.waiting.empty()) EndPhaseIfComplete(phases);
}

void Block::EndPhaseIfComplete(Phases& phases) {
  if (phases.left != 0 || phases.announced != 0) return;
  for (const Copy& copy : phases.copies) Finish(copy);
  phases.copies.clear();
  phases.left = phases.arrivals;
  ++phases.ended;
  phases.ended_with = std::move(phases.released);
  phases.released.clear();
  for (int thread : phases.waiting) Wake(thread);
  phases.waiting.clear();
  polls_ = 0;
}

void Block::WaitForPhase(const void* barrier, uint32_t parity, const SourceLocation& where) {
  Phases& phases = PhasesAt(barrier, where);
  if (phases.ended % 2 == parity) EndPhaseIfComplete(phases);
  while (phases.ended % 2 == parity) {
    phases.waiting.push_back(current_);
    current().state = State::kAtPhase;
    current().where = where;
    WarpOf(current_).runnable &= ~(1u << current_ % kWarpSize);
    SwitchAway();
  }
  shared_.Acquire(current_ / kWarpSize, phases.ended_with);
}

void Block::CopyInPhase(const void* barrier, void* to, const void* from, int bytes,
                        const SourceLocation& where) {
  Phases& phases = PhasesAt(barrier, where);
  CheckShared(to, bytes, Access::kStore, where);
  if (from != nullptr) CheckGlobal(from, bytes, Access::kLoad, where);
  shared_.BeginCopy(to, bytes);
  shared_.Release(current_ / kWarpSize, phases.released);
  phases.copies.push_back({static_cast<std::byte*>(to), from, bytes, 0});
  phases.announced -= bytes;
  if (!phases.waiting.empty()) EndPhaseIfComplete(phases);
}

void Block::Fail(absl::string_view what, const SourceLocation& where) {
  failure_ = absl::StrCat("thread ", current_, " at ", Describe(where), ": ", what);
  Fiber::Switch(current().fiber, host_);
  CHECK(false) << "an abandoned thread was continued";
  __builtin_unreachable();
}

absl::StatusOr<LaunchReport> Launch(const LaunchOptions& options, const Kernel& kernel) {
  CHECK(running == nullptr) << "a launch inside a launch";
  CHECK(options.threads >= kWarpSize && options.threads % kWarpSize == 0 &&
        options.threads <= kMaxWarps * kWarpSize)
      << options.threads;
  Block block(options, kernel);
  running = &block;
  absl::Status status;
  const Dimensions& grid = options.grid;
  for (uint32_t z = 0; z < grid.z && status.ok(); ++z) {
    for (uint32_t y = 0; y < grid.y && status.ok(); ++y) {
      for (uint32_t x = 0; x < grid.x && status.ok(); ++x) status = block.Run({x, y, z});
    }
  }
  running = nullptr;
  if (!status.ok()) return status;
  return block.Finish();
}

bool InKernel() { return running != nullptr; }
int CurrentLane() { return running->current_thread() % kWarpSize; }
int CurrentThread() { return running->current_thread(); }
std::byte* CurrentShared() { return running->current().place.shared; }

void MeetInWarp(WarpOperation run, void* argument, uint32_t mask, const SourceLocation& where) {
  running->MeetInWarp(run, argument, mask, where);
}
void SynchroniseWarp(uint32_t mask, const SourceLocation& where) {
  running->SynchroniseWarp(mask, where);
}
void WaitAtBarrier(int id, int threads, const SourceLocation& where) {
  running->ArriveAtBarrier(id, threads, /*wait=*/true, where);
}
void ArriveAtBarrier(int id, int threads, const SourceLocation& where) {
  running->ArriveAtBarrier(id, threads, /*wait=*/false, where);
}
void CheckShared(const void* address, int bytes, Access access, const SourceLocation& where) {
  running->CheckShared(address, bytes, access, where);
}
void CheckGlobal(const void* address, int bytes, Access access, const SourceLocation& where) {
  running->CheckGlobal(address, bytes, access, where);
}
void CopyLater(void* to, const void* from, int bytes, const SourceLocation& where) {
  running->CopyLater(to, from, bytes, where);
}
void CommitCopies() { running->CommitCopies(); }
void WaitForCopies(int left, const SourceLocation& where) { running->WaitForCopies(left, where); }
void InitPhases(const void* barrier, int arrivals, const SourceLocation& where) {
  running->InitPhases(barrier, arrivals, where);
}
void ArriveAtPhase(const void* barrier, int64_t announced, const SourceLocation& where) {
  running->ArriveAtPhase(barrier, announced, where);
}
void WaitForPhase(const void* barrier, uint32_t parity, const SourceLocation& where) {
  running->WaitForPhase(barrier, parity, where);
}
void CopyInPhase(const void* barrier, void* to, const void* from, int bytes,
                 const SourceLocation& where) {
  running->CopyInPhase(barrier, to, from, bytes, where);
}
void AddLater(std::function<void()> sum) { running->sums().Add(std::move(sum)); }
void CommitSums() { running->sums().Commit(); }
void WaitForSums(int left) { running->sums().Finish(left); }
void DoLater(std::function<void()> work) { running->work().Add(std::move(work)); }
void CommitWork(const SourceLocation& where) {
  running->MeetInWarp([](void* const*, uint32_t) { running->work().Commit(); }, nullptr, ~0u,
                      where);
}
void FinishWork(int left, const SourceLocation& where) {
  int shared_left = left;
  running->MeetInWarp(
      [](void* const* lanes, uint32_t) { running->work().Finish(*static_cast<int*>(lanes[0])); },
      &shared_left, ~0u, where);
}
void Poll(const SourceLocation& where) { running->Poll(where); }
void Fail(absl::string_view what, const SourceLocation& where) { running->Fail(what, where); }

}  // namespace attnd::emulator
