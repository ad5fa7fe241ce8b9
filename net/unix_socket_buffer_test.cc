#include "net/unix_socket_buffer.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

namespace attnd {
namespace {

int SendBufferOf(int socket) {
  int bytes = 0;
  socklen_t size = sizeof(bytes);
  EXPECT_EQ(getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, &size), 0);
  return bytes;
}

TEST(UnixSocketBuffer, IsWidenedAndNoOthers) {
  for (int family : {AF_UNIX, AF_INET}) {
    const int socket = ::socket(family, SOCK_STREAM, 0);
    const int before = SendBufferOf(socket);
    WidenIfUnixSocket(socket);
    const int after = SendBufferOf(socket);
    EXPECT_EQ(after > before, family == AF_UNIX) << before << " " << after;
    WidenIfUnixSocket(socket);
    EXPECT_EQ(SendBufferOf(socket), after);
    close(socket);
  }
}

TEST(UnixSocketBuffer, LeavesAWiderOneAndWhatIsNoSocketAlone) {
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  const int wide = 4 << 20;
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &wide, sizeof(wide));
  const int before = SendBufferOf(socket);
  WidenIfUnixSocket(socket);
  EXPECT_EQ(SendBufferOf(socket), before);
  close(socket);
  WidenIfUnixSocket(-1);
}

}  // namespace
}  // namespace attnd
