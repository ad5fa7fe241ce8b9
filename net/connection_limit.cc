#include "net/connection_limit.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>

namespace attnd {
namespace {

// At the limit closed connections are looked for at most this often: each look asks the kernel
// about every connection.
constexpr absl::Duration kLookAgain = absl::Milliseconds(20);
// Descriptors for files, GPUs, shared memory, the metrics port, and connections on their way out.
constexpr rlim_t kOtherDescriptors = 1024;

// Nothing for what is no socket.
std::optional<uint64_t> CookieOf(int socket) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  if (getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) return std::nullopt;
  return cookie;
}

bool IsUnixSocket(int socket) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

}  // namespace

bool ConnectionLimit::Take(int socket) {
  absl::MutexLock lock(&mutex_);
  if (open_.size() >= max_ && clock_.Now() >= looked_at_ + kLookAgain) ForgetClosed();
  if (open_.size() < max_) {
    open_.push_back({socket, CookieOf(socket).value_or(0), IsUnixSocket(socket)});
    return true;
  }
  ++refused_;
  return false;
}

void ConnectionLimit::ForgetClosed() {
  looked_at_ = clock_.Now();
  open_.erase(std::remove_if(open_.begin(), open_.end(),
                             [](const Connection& c) { return CookieOf(c.socket) != c.cookie; }),
              open_.end());
}

ConnectionLimit::Open ConnectionLimit::open() {
  absl::MutexLock lock(&mutex_);
  ForgetClosed();
  Open open;
  for (const Connection& connection : open_) ++(connection.is_unix ? open.unix_sockets : open.tcp);
  return open;
}

int64_t ConnectionLimit::refused() {
  absl::MutexLock lock(&mutex_);
  return refused_;
}

int ConnectionsThatFit(int wanted) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return wanted;
  rlim_t others = std::min(kOtherDescriptors, files.rlim_cur / 2);
  return static_cast<int>(std::min<rlim_t>(static_cast<rlim_t>(wanted), files.rlim_cur - others));
}

}  // namespace attnd
