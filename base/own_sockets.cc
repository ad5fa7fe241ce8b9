#include "base/own_sockets.h"

#include <grpc/support/sync.h>
#include <grpc/support/time.h>
#include <grpcpp/version_info.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "base/check.h"
#include "base/event_order.h"
#include "base/keep_grpc.h"

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare with this gRPC's src/core/lib/iomgr/ev_epoll1_linux.cc");

namespace attnd {

// gRPC's, which its packages do not declare.
struct Pollset;
struct PollsetWorker;
struct WatchedSocket;
struct ExecContext;

void SetReadable(WatchedSocket* socket) __asm__("_Z20grpc_fd_set_readableP7grpc_fd");
void SetWritable(WatchedSocket* socket) __asm__("_Z20grpc_fd_set_writableP7grpc_fd");
bool RunClosures(ExecContext* context) __asm__("_ZN9grpc_core7ExecCtx5FlushEv");
extern __thread ExecContext* of_thread __asm__("_ZN9grpc_core7ExecCtx9exec_ctx_E");

// grpc_pollset_init, grpc_pollset_work and grpc_pollset_kick, and what is called in their place.
// A time is of grpc_core::Timestamp, one number.
void Init(Pollset* pollset,
          gpr_mu** mutex) __asm__("__real__Z17grpc_pollset_initP12grpc_pollsetPPl");
void NoteInit(Pollset* pollset,
              gpr_mu** mutex) __asm__("__wrap__Z17grpc_pollset_initP12grpc_pollsetPPl");
absl::Status Work(Pollset* pollset, PollsetWorker** worker, int64_t deadline) __asm__(
    "__real__Z17grpc_pollset_workP12grpc_pollsetPP19grpc_pollset_workerN9grpc_core9TimestampE");
absl::Status WorkOrTell(Pollset* pollset, PollsetWorker** worker, int64_t deadline) __asm__(
    "__wrap__Z17grpc_pollset_workP12grpc_pollsetPP19grpc_pollset_workerN9grpc_core9TimestampE");
absl::Status Kick(Pollset* pollset, PollsetWorker* worker) __asm__(
    "__real__Z17grpc_pollset_kickP12grpc_pollsetP19grpc_pollset_worker");
absl::Status KickAnother(Pollset* pollset, PollsetWorker* worker) __asm__(
    "__wrap__Z17grpc_pollset_kickP12grpc_pollsetP19grpc_pollset_worker");

namespace {

constexpr int64_t kLookEveryMs = 250;
constexpr uint64_t kWake = 0;  // in epoll_event::data, where no address is

std::atomic<bool> program_calls{false}, within_program{false};

// Of the thread that is in Drive.
thread_local OwnSockets* own = nullptr;
thread_local Pollset* own_pollset = nullptr;
thread_local bool something_is_there = false;

// Linux lets a thread that wakes up take the core of one whose time slice is longer (6.12,
// PREEMPT_SHORT), so a small call does not wait for transfers; an older one takes no notice. A
// policy that somebody has chosen for the process stays.
void LetOthersPass() {
  if (sched_getscheduler(0) != SCHED_OTHER) return;
  constexpr uint64_t kSliceNs = 20'000'000;
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice_ns, deadline, period;
  } attributes{};
  attributes.size = sizeof(attributes);
  attributes.nice = getpriority(PRIO_PROCESS, 0);
  attributes.slice_ns = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

// A pollset begins with its mutex, or it is none of this gRPC's.
void NoteInit(Pollset* pollset, gpr_mu** mutex) {
  Init(pollset, mutex);
  within_program = static_cast<void*>(*mutex) == static_cast<void*>(pollset);
}

// As gRPC's own: called with the mutex, which it gives back while it works, and it leaves nothing
// that it has caused undone.
absl::Status WorkOrTell(Pollset* pollset, PollsetWorker** worker, int64_t deadline) {
  if (own == nullptr) return Work(pollset, worker, deadline);
  own_pollset = pollset;
  auto* mutex = reinterpret_cast<gpr_mu*>(pollset);
  gpr_mu_unlock(mutex);
  own->Tell();
  RunClosures(of_thread);
  gpr_mu_lock(mutex);
  return absl::OkStatus();
}

absl::Status KickAnother(Pollset* pollset, PollsetWorker* worker) {
  if (own == nullptr || own_pollset != pollset || worker != nullptr) return Kick(pollset, worker);
  something_is_there = true;
  return absl::OkStatus();
}

std::unique_ptr<OwnSockets> OwnSockets::Create() {
  if (!program_calls || !within_program) return nullptr;
  KeepGrpc();  // nothing else may happen on gRPC's own set that would end that wait earlier
  FileDescriptor epoll(epoll_create1(EPOLL_CLOEXEC));
  FileDescriptor wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll.valid() || !wake.valid()) return nullptr;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) return nullptr;
  return std::unique_ptr<OwnSockets>(new OwnSockets(std::move(epoll), std::move(wake)));
}

void OwnSockets::OnProgramCalls() { program_calls = true; }

OwnSockets::OwnSockets(FileDescriptor epoll, FileDescriptor wake)
    : epoll_(std::move(epoll)), wake_(std::move(wake)) {
  EventOrder::Get().Join(epoll_.get());
}
OwnSockets::~OwnSockets() { EventOrder::Get().Leave(epoll_.get()); }

void OwnSockets::Wake() {
  const uint64_t one = 1;
  CHECK(write(wake_.get(), &one, sizeof(one)) == sizeof(one));
}

bool OwnSockets::Drive(grpc_completion_queue* queue,
                       absl::FunctionRef<void(void* tag, bool ok)> run) {
  own = this;
  [[maybe_unused]] thread_local const bool lets_pass = (LetOthersPass(), true);
  const auto left = absl::MakeCleanup([] { own = nullptr; });
  Wait();
  while (true) {
    something_is_there = false;
    // Its own first completion does not pass through the queue.
    grpc_completion_queue_thread_local_cache_init(queue);
    const grpc_event event =
        grpc_completion_queue_next(queue, gpr_inf_past(GPR_CLOCK_MONOTONIC), nullptr);
    void* tag = nullptr;
    int ok = 0;
    const bool has_own = grpc_completion_queue_thread_local_cache_flush(queue, &tag, &ok) != 0;
    if (has_own) run(tag, ok != 0);
    if (event.type == GRPC_OP_COMPLETE) run(event.tag, event.success != 0);
    if (event.type == GRPC_QUEUE_SHUTDOWN) return false;
    if (event.type == GRPC_QUEUE_TIMEOUT && !has_own && !something_is_there) return true;
  }
}

void OwnSockets::Wait() {
  heard_ = std::max(0, epoll_wait(epoll_.get(), events_.data(), kMostEvents, -1));
  const int64_t now = EventOrder::NowMs();
  if (now < look_at_) return;
  look_at_ = now + kLookEveryMs;
  EventOrder::Get().TakeBack(epoll_.get());
}

// As gRPC does it; the lowest bit of what stands for a socket is not of its address.
void OwnSockets::Tell() {
  const int heard = std::exchange(heard_, 0);
  for (int n = 0; n < heard; ++n) {
    const uint32_t events = events_[n].events;
    if (events_[n].data.u64 == kWake) {
      uint64_t count;
      [[maybe_unused]] const auto got = read(wake_.get(), &count, sizeof(count));
      continue;
    }
    auto* socket = reinterpret_cast<WatchedSocket*>(events_[n].data.u64 & ~uint64_t{1});
    const bool ended = (events & (EPOLLHUP | EPOLLERR)) != 0;
    if (ended || (events & (EPOLLIN | EPOLLPRI)) != 0) SetReadable(socket);
    if (ended || (events & EPOLLOUT) != 0) SetWritable(socket);
  }
}

}  // namespace attnd
