#include "net/descriptor_socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace attnd {
namespace {

SocketResult ResultOfError() {
  return errno == EAGAIN || errno == EWOULDBLOCK ? SocketResult::kWouldBlock
                                                 : SocketResult::kClosed;
}

// All that came, however many: what nobody takes is closed.
void TakeDescriptors(msghdr& message, Packet& packet) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t n = 0; n < count; ++n) {
      int fd;
      memcpy(&fd, CMSG_DATA(c) + n * sizeof(int), sizeof(int));
      packet.descriptors.emplace_back(fd);
    }
  }
}

}  // namespace

SocketResult SendPacket(int socket, absl::string_view bytes, int descriptor, bool wait) {
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? ResultOfError() : SocketResult::kDone;
}

SocketResult ReceivePacket(int socket, bool wait, Packet& packet) {
  packet = Packet();
  packet.bytes.resize(kMaxPacketBytes);
  iovec part = {packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  } while (received < 0 && errno == EINTR);
  if (received < 0) return ResultOfError();
  TakeDescriptors(message, packet);
  packet.truncated = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  packet.bytes.resize(static_cast<size_t>(received));
  // An empty packet cannot be told from the end of the stream, and none of ours is empty.
  return received == 0 ? SocketResult::kClosed : SocketResult::kDone;
}

}  // namespace attnd
