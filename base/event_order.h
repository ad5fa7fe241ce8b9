// EventOrder: of gRPC's sockets that have something for it, those that bring little come first.
//
// gRPC 1.51 waits for all sockets of a process in one epoll set, one thread at a time. That thread
// takes up to a hundred events and wakes another thread for each but the first, 30 to 50 us on a
// VM, so a small call waits for all large transfers that were there before it. Here epoll_wait(2)
// gives gRPC one event at a time, keeps the others that it took from the kernel, and asks for newer
// ones before it gives the next: small calls pass large transfers (docs/PERFORMANCE.md, Wire).
//
//   kernel → kept: small, large → gRPC      one large after at most kSmallInARow small; else in
//   turn
//
// Unix sockets are quiet: Linux tells of each message that the peer has read, since the socket can
// be written then, which wakes both ends once more in each call. The set asks for that only after a
// write has found no room; from then on as gRPC does.
//
// A program's own symbols come before those of its libraries (program_calls.cc). In a program that
// does not replace epoll_create1, epoll_ctl, epoll_wait and sendmsg nothing is ordered; and a set
// to which no announced socket came is left alone: one comparison, then the system call.
//
// A socket that moves much may leave gRPC's set for that of a thread (own_sockets.h). The kernel
// looks anew at what it has when it comes to another set, so no event is lost on the way.
//
// No event is lost, though gRPC's sockets are edge-triggered: what is kept is given, as it came, at
// the next wait of any thread (events of one socket become one). Until some thread waits it stays,
// as in gRPC's own array of events: gRPC names the thread that waits next before it handles what a
// wait gave, so none sleeps in the kernel while there is something here. What came for a socket
// that has been closed meanwhile is given too: gRPC keeps such events itself, and what stands in
// epoll_event::data stays valid until it makes another set. That begins with nothing kept, in a
// child of fork(2) as well.
//
// Threads: any. The lock is held while the kernel is asked for newer events, which does not block:
// nobody wants it then but a new connection. Source: gRPC 1.51,
// src/core/lib/iomgr/ev_epoll1_linux.cc.
#pragma once

#include <sys/epoll.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class EventOrder {
 public:
  // A read that brings so much makes its socket large for this and the next kLargeReads.
  static constexpr int64_t kLargeBytes = 32 << 10;
  static constexpr int kLargeReads = 4;
  // So many small ones pass a large one.
  static constexpr int kSmallInARow = 8;
  // A message of so many bytes that begins to come is much, and so is a write; for so long.
  static constexpr int64_t kMuchBytes = 256 << 10;
  static constexpr int64_t kMuchForMs = 1000;

  // The process's.
  static EventOrder& Get();

  // gRPC is about to wait for the socket: the set that it comes to is gRPC's.
  void Announce(int socket);
  // What recvmsg(2) gave.
  void OnRead(int socket, int64_t bytes);
  // sendmsg(2) has failed, for want of room perhaps.
  void OnSendFailed(int socket);

  // The set of a thread, by its descriptor. Leave gives its sockets back.
  void Join(int own_epoll);
  void Leave(int own_epoll);
  // A message of so many bytes comes by the socket, or a write of them begins.
  void OnMoves(int socket, int64_t bytes);
  // Before a read of it: whether the socket has just gone to the set of a thread, which hears of
  // what is there; gRPC is to wait for that.
  bool HandOver(int socket);
  // Gives back what has not moved much for a while.
  void TakeBack(int own_epoll);
  // Of a clock that costs nothing.
  static int64_t NowMs();

  // Tells gRPC of a unix socket once more, if it has something for it.
  void TellAgain(int socket);

  // As epoll_create1(2), epoll_ctl(2) and epoll_wait(2).
  int Create(int flags);
  int Control(int epoll, int operation, int socket, epoll_event* event);
  int Wait(int epoll, epoll_event* events, int most, int timeout_ms);

 private:
  // What epoll_event::data holds, gRPC's own pointer.
  using Name = uint64_t;
  static constexpr Name kNoName = 0;
  // Those beyond are small.
  static constexpr int kMostSockets = 16384;
  struct Socket {
    std::atomic<bool> announced{false};
    std::atomic<int> large_reads{0};  // that are still to come
    std::atomic<Name> name{kNoName};  // none: it came before the set was known to be gRPC's
    std::atomic<bool> is_unix{false};
    std::atomic<bool> quiet{false};         // a unix socket
    std::atomic<int64_t> much_until_ms{0};  // 0: it does not move much
    std::atomic<int> own_epoll{kNone};      // of the thread that has it
  };

  struct OwnSet {
    int epoll = kNone;
    std::vector<int> sockets;  // and some that have left it
  };
  static constexpr int kNone = -1;

  static bool Known(int socket) { return socket >= 0 && socket < kMostSockets; }
  int Ordered(int epoll, int operation, int socket, epoll_event* event);
  void Begin(int epoll) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Keep(const epoll_event* events, int count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLarge(Name name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Give(epoll_event& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The set that the socket is in.
  int SetOf(int socket) const {
    const int own = sockets_[socket].own_epoll;
    return own != kNone ? own : epoll_.load();
  }
  int Watch(int operation, int socket, int epoll) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<OwnSet>::iterator Find(int own_epoll) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::find_if(own_sets_.begin(), own_sets_.end(),
                        [&](const OwnSet& set) { return set.epoll == own_epoll; });
  }
  bool Move(int socket, int from, int to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  OwnSet* LeastUsed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<int> epoll_{-1};  // gRPC's set
  std::array<Socket, kMostSockets> sockets_;

  absl::Mutex mutex_;
  absl::flat_hash_map<Name, int> socket_of_ ABSL_GUARDED_BY(mutex_);
  // Taken from the kernel and not given yet: what happened, and the order, each name in one queue.
  absl::flat_hash_map<Name, uint32_t> kept_ ABSL_GUARDED_BY(mutex_);
  std::deque<Name> small_ ABSL_GUARDED_BY(mutex_), large_ ABSL_GUARDED_BY(mutex_);
  int small_in_a_row_ ABSL_GUARDED_BY(mutex_) = 0;  // that passed a large one
  std::vector<OwnSet> own_sets_ ABSL_GUARDED_BY(mutex_);
  pid_t own_process_ ABSL_GUARDED_BY(mutex_) = 0;  // whose threads wait for them
  std::atomic<bool> has_own_sets_{false};
};

}  // namespace attnd
