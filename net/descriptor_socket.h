// A packet and the file descriptors that travel with it over a SOCK_SEQPACKET unix socket
// (SCM_RIGHTS). Threads: any, one at a time for each socket and direction.
// Source: unix(7), cmsg(3).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "net/file_descriptor.h"

namespace attnd {

inline constexpr size_t kMaxPacketBytes = 4096;

struct Packet {
  std::string bytes;
  std::vector<FileDescriptor> descriptors;  // close-on-exec
  bool truncated = false;                   // longer than kMaxPacketBytes, or descriptors were lost
};

enum class SocketResult { kDone, kWouldBlock, kClosed };

// kClosed also for errors of the connection. `descriptor`: -1 sends none.
SocketResult SendPacket(int socket, absl::string_view bytes, int descriptor, bool wait);
SocketResult ReceivePacket(int socket, bool wait, Packet& packet);

}  // namespace attnd
