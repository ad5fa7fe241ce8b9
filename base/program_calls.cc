// System calls of a program that links this, for its libraries too: payload_receiver.h and
// event_order.h. Not for a shared library: a linker exports a symbol that replaces another
// library's, whatever its version script says, and a program that loads it keeps its own.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/event_order.h"
#include "base/own_sockets.h"
#include "base/payload_receiver.h"

namespace {

[[maybe_unused]] const bool noted = [] {
  attnd::OwnSockets::OnProgramCalls();
  return true;
}();

}  // namespace

extern "C" {

ssize_t recvmsg(int socket, msghdr* message, int flags) {
  const ssize_t got = attnd::ReceiveMessage(socket, message, flags);
  attnd::EventOrder::Get().OnRead(socket, got);
  return got;
}

ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  attnd::EventOrder::Get().OnMoves(socket, static_cast<int64_t>(attnd::RoomOf(*message)));
  const ssize_t sent = syscall(SYS_sendmsg, socket, message, flags);
  if (sent < 0) {
    const int error = errno;
    attnd::EventOrder::Get().OnSendFailed(socket);
    errno = error;
  }
  return sent;
}

int epoll_create1(int flags) noexcept { return attnd::EventOrder::Get().Create(flags); }

int epoll_ctl(int epoll, int operation, int socket, epoll_event* event) noexcept {
  return attnd::EventOrder::Get().Control(epoll, operation, socket, event);
}

int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  return attnd::EventOrder::Get().Wait(epoll, events, most, timeout_ms);
}

}  // extern "C"
