#include "net/unix_socket_buffer.h"

#include <sys/socket.h>

namespace attnd {
namespace {

constexpr int kSendBytes = 1 << 20;  // the system doubles it, for its own bookkeeping

}  // namespace

void WidenIfUnixSocket(int socket) {
  int family = 0, bytes = 0;
  socklen_t size = sizeof(family);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0 || family != AF_UNIX) return;
  size = sizeof(bytes);
  if (getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, &size) != 0 || bytes >= kSendBytes) return;
  // Refused: it is as it was.
  (void)setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kSendBytes, sizeof(kSendBytes));
}

}  // namespace attnd
