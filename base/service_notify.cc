#include "base/service_notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attnd {

absl::Status NotifyServiceManager(absl::string_view state) {
  const char* address = std::getenv("NOTIFY_SOCKET");
  if (address == nullptr || *address == 0) return absl::OkStatus();
  return NotifyServiceManagerAt(address, state);
}

absl::Status NotifyServiceManagerAt(absl::string_view address, absl::string_view state) {
  sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  if (address.size() < 2 || address.size() >= sizeof(to.sun_path) ||
      (address[0] != '/' && address[0] != '@')) {
    return absl::InvalidArgumentError(absl::StrCat("NOTIFY_SOCKET: no unix socket: ", address));
  }
  std::memcpy(to.sun_path, address.data(), address.size());
  if (address[0] == '@') to.sun_path[0] = 0;
  socklen_t length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
  int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ssize_t sent = sendto(descriptor, state.data(), state.size(), MSG_NOSIGNAL,
                        reinterpret_cast<const sockaddr*>(&to), length);
  int error = errno;
  if (descriptor >= 0) close(descriptor);
  if (sent == static_cast<ssize_t>(state.size())) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("NOTIFY_SOCKET: ", std::strerror(error)));
}

absl::Duration WatchdogPeriod() {
  const char* period = std::getenv("WATCHDOG_USEC");
  const char* process = std::getenv("WATCHDOG_PID");  // unset: any process of the service
  int64_t microseconds = 0, id = 0;
  if (period == nullptr || !absl::SimpleAtoi(period, &microseconds) || microseconds <= 0) {
    return absl::InfiniteDuration();
  }
  const bool is_mine = process == nullptr || (absl::SimpleAtoi(process, &id) && id == getpid());
  return is_mine ? absl::Microseconds(microseconds) : absl::InfiniteDuration();
}

}  // namespace attnd
