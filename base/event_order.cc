#include "base/event_order.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace attnd {
namespace {

// As gRPC adds a socket.
constexpr uint32_t kSocketEvents = EPOLLIN | EPOLLOUT | EPOLLET;

bool IsConnectedUnixSocket(int socket) {
  sockaddr_storage there{};
  socklen_t size = sizeof(there);
  const bool connected = getpeername(socket, reinterpret_cast<sockaddr*>(&there), &size) == 0;
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
  for (Socket& socket : sockets_) {
    socket.name = kNoName;
    socket.is_unix = false;
  }
  socket_of_.clear();
  kept_.clear();
  small_.clear();
  large_.clear();
}

// gRPC asks for errno of its connect(2) after the socket has been added, so it stays, whatever else
// is done here: a mutex that somebody waits for may look at files of the system.
int EventOrder::Control(int epoll, int operation, int socket, epoll_event* event) {
  const int error = errno;
  const int done = Ordered(epoll, operation, socket, event);
  if (done == 0) errno = error;
  return done;
}

int EventOrder::Ordered(int epoll, int operation, int socket, epoll_event* event) {
  const bool adds = operation == EPOLL_CTL_ADD && (event->events & kSocketEvents) == kSocketEvents;
  if (adds && Known(socket) && (sockets_[socket].announced.exchange(false) || epoll == epoll_)) {
    absl::MutexLock lock(&mutex_);
    if (epoll != epoll_) Begin(epoll);
    Socket& added = sockets_[socket];
    socket_of_[event->data.u64] = socket;
    added.large_reads = 0;
    added.name = event->data.u64;
    added.much_until_ms = 0;
    added.own_epoll = kNone;
    added.quiet = added.is_unix = IsConnectedUnixSocket(socket);
    if (Watch(EPOLL_CTL_ADD, socket, epoll) == 0) return 0;
    // Move has just added it by its number, which was that of a socket closed in the meantime.
    return errno == EEXIST ? Watch(EPOLL_CTL_MOD, socket, epoll) : -1;
  }
  if (operation == EPOLL_CTL_DEL && epoll == epoll_ && Known(socket)) {
    absl::MutexLock lock(&mutex_);
    const int own = sockets_[socket].own_epoll.exchange(kNone);
    return SystemControl(own != kNone ? own : epoll, operation, socket, event);
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
  Socket& asked = sockets_[socket];
  if (!asked.is_unix) return;
  absl::MutexLock lock(&mutex_);
  asked.quiet = false;
  Watch(EPOLL_CTL_MOD, socket, SetOf(socket));
}

int EventOrder::Watch(int operation, int socket, int epoll) {
  const Socket& watched = sockets_[socket];
  epoll_event event{};
  event.events = watched.quiet ? kSocketEvents & ~EPOLLOUT : kSocketEvents;
  event.data.u64 = watched.name;
  return SystemControl(epoll, operation, socket, &event);
}

int64_t EventOrder::NowMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{1000} * now.tv_sec + now.tv_nsec / 1'000'000;
}

void EventOrder::Join(int own_epoll) {
  absl::MutexLock lock(&mutex_);
  if (std::exchange(own_process_, getpid()) != getpid()) own_sets_.clear();
  own_sets_.push_back({own_epoll});
  has_own_sets_ = true;
}

void EventOrder::Leave(int own_epoll) {
  absl::MutexLock lock(&mutex_);
  const auto set = Find(own_epoll);
  if (set == own_sets_.end()) return;
  for (int socket : set->sockets) Move(socket, own_epoll, epoll_);
  own_sets_.erase(set);
  has_own_sets_ = !own_sets_.empty();
}

void EventOrder::OnMoves(int socket, int64_t bytes) {
  if (bytes >= kMuchBytes && Known(socket)) sockets_[socket].much_until_ms = NowMs() + kMuchForMs;
}

bool EventOrder::HandOver(int socket) {
  if (!has_own_sets_ || !Known(socket)) return false;
  const Socket& asked = sockets_[socket];
  const int64_t much_until = asked.much_until_ms;
  if (much_until == 0 || asked.own_epoll != kNone || much_until < NowMs()) return false;
  absl::MutexLock lock(&mutex_);
  if (asked.name == kNoName) return false;
  OwnSet* set = LeastUsed();
  if (set == nullptr || !Move(socket, epoll_, set->epoll)) return false;
  set->sockets.push_back(socket);
  return true;
}

// No thread of a parent process waits here.
EventOrder::OwnSet* EventOrder::LeastUsed() {
  if (own_process_ != getpid()) return nullptr;
  OwnSet* least = nullptr;
  for (OwnSet& set : own_sets_) {
    auto gone = [&](int socket) { return sockets_[socket].own_epoll != set.epoll; };
    set.sockets.erase(std::remove_if(set.sockets.begin(), set.sockets.end(), gone),
                      set.sockets.end());
    if (least == nullptr || set.sockets.size() < least->sockets.size()) least = &set;
  }
  return least;
}

// The kernel tells the other set at once of what there is. Of a number that has become another's
// neither set knows.
bool EventOrder::Move(int socket, int from, int to) {
  Socket& moved = sockets_[socket];
  epoll_event nothing{};
  if (SetOf(socket) != from || SystemControl(from, EPOLL_CTL_DEL, socket, &nothing) != 0)
    return false;
  moved.own_epoll = to == epoll_ ? kNone : to;
  if (Watch(EPOLL_CTL_ADD, socket, to) == 0) return true;
  moved.own_epoll = from == epoll_ ? kNone : from;
  Watch(EPOLL_CTL_ADD, socket, from);
  return false;
}

void EventOrder::TakeBack(int own_epoll) {
  const int64_t now = NowMs();
  absl::MutexLock lock(&mutex_);
  const auto set = Find(own_epoll);
  if (set == own_sets_.end()) return;
  for (int socket : set->sockets) {
    if (sockets_[socket].much_until_ms >= now) continue;
    Move(socket, own_epoll, epoll_);
  }
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
