#include "base/event_order.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace attnd {
namespace {

// As gRPC adds a socket.
constexpr uint32_t kSocketEvents = EPOLLIN | EPOLLOUT | EPOLLET;

// gRPC asks for errno of its connect(2) after the socket has been added: it stays.
bool IsConnectedUnixSocket(int socket) {
  const int error = errno;
  sockaddr_storage there{};
  socklen_t size = sizeof(there);
  const bool connected = getpeername(socket, reinterpret_cast<sockaddr*>(&there), &size) == 0;
  errno = error;
  return connected && there.ss_family == AF_UNIX;
}

// The system calls themselves, whose names are ours.
int SystemControl(int epoll, int operation, int socket, epoll_event* event) {
  return static_cast<int>(syscall(SYS_epoll_ctl, epoll, operation, socket, event));
}
int SystemWait(int epoll, epoll_event* events, int most, int timeout_ms) {
  constexpr size_t kSignalSetBytes = 8;
  return static_cast<int>(
      syscall(SYS_epoll_pwait, epoll, events, most, timeout_ms, nullptr, kSignalSetBytes));
}

}  // namespace

EventOrder& EventOrder::Get() {
  static auto* order = new EventOrder;
  return *order;
}

void EventOrder::Announce(int socket) {
  if (Known(socket)) sockets_[socket].announced = true;
}

void EventOrder::OnRead(int socket, int64_t bytes) {
  if (!Known(socket)) return;
  std::atomic<int>& reads = sockets_[socket].large_reads;  // one thread at a time reads a socket
  if (bytes >= kLargeBytes) {
    reads = kLargeReads;
  } else if (const int left = reads; left > 0) {
    reads = left - 1;
  }
}

// Its number may be that of gRPC's set, which was closed.
int EventOrder::Create(int flags) {
  const int epoll = static_cast<int>(syscall(SYS_epoll_create1, flags));
  if (epoll >= 0 && epoll == epoll_) {
    absl::MutexLock lock(&mutex_);
    Begin(-1);
  }
  return epoll;
}

void EventOrder::Begin(int epoll) {
  epoll_ = epoll;
  socket_of_.clear();
  kept_.clear();
  small_.clear();
  large_.clear();
}

int EventOrder::Control(int epoll, int operation, int socket, epoll_event* event) {
  const bool adds = operation == EPOLL_CTL_ADD && (event->events & kSocketEvents) == kSocketEvents;
  if (adds && Known(socket) && (sockets_[socket].announced.exchange(false) || epoll == epoll_)) {
    absl::MutexLock lock(&mutex_);
    if (epoll != epoll_) Begin(epoll);
    socket_of_[event->data.u64] = socket;
    sockets_[socket].large_reads = 0;
    sockets_[socket].quiet = false;
    sockets_[socket].unix_name = 0;
    if (IsConnectedUnixSocket(socket)) {
      sockets_[socket].unix_name = event->data.u64;
      sockets_[socket].quiet = true;
      epoll_event quiet = *event;
      quiet.events &= ~EPOLLOUT;
      return SystemControl(epoll, operation, socket, &quiet);
    }
  }
  return SystemControl(epoll, operation, socket, event);
}

// The kernel tells at once if there is room again.
void EventOrder::OnSendFailed(int socket) {
  if (Known(socket) && sockets_[socket].quiet.exchange(false)) TellAgain(socket);
}

// It looks anew at what a socket has when it is asked for events again.
void EventOrder::TellAgain(int socket) {
  if (!Known(socket)) return;
  const Name name = sockets_[socket].unix_name;
  if (name == 0) return;
  sockets_[socket].quiet = false;
  epoll_event event{};
  event.events = kSocketEvents;
  event.data.u64 = name;
  SystemControl(epoll_, EPOLL_CTL_MOD, socket, &event);
}

int EventOrder::Wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  if (epoll != epoll_ || most < 1) return SystemWait(epoll, events, most, timeout_ms);
  {
    absl::MutexLock lock(&mutex_);
    if (!large_.empty()) Keep(events, SystemWait(epoll, events, most, 0));
    if (Give(*events)) return 1;
  }
  const int got = SystemWait(epoll, events, most, timeout_ms);
  if (got <= 0) return got;
  absl::MutexLock lock(&mutex_);
  if (epoll != epoll_) return got;  // made anew meanwhile
  Keep(events, got);
  return Give(*events) ? 1 : 0;
}

void EventOrder::Keep(const epoll_event* events, int count) {
  for (int n = 0; n < count; ++n) {
    const Name name = events[n].data.u64;
    auto [kept, is_new] = kept_.try_emplace(name, 0);
    kept->second |= events[n].events;
    if (is_new) (IsLarge(name) ? large_ : small_).push_back(name);
  }
}

// What is no connection, gRPC's own wake-up and its listeners, is small.
bool EventOrder::IsLarge(Name name) const {
  auto socket = socket_of_.find(name);
  return socket != socket_of_.end() && sockets_[socket->second].large_reads > 0;
}

bool EventOrder::Give(epoll_event& event) {
  if (kept_.empty()) return false;
  const bool passes = small_in_a_row_ < kSmallInARow || large_.empty();
  std::deque<Name>& from = !small_.empty() && passes ? small_ : large_;
  small_in_a_row_ = &from == &small_ && !large_.empty() ? small_in_a_row_ + 1 : 0;
  const auto kept = kept_.find(from.front());
  event.data.u64 = kept->first;
  event.events = kept->second;
  kept_.erase(kept);
  from.pop_front();
  return true;
}

}  // namespace attnd
