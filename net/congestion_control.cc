#include "net/congestion_control.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>

namespace attnd {
namespace {

bool SameHost(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

bool SetCongestionControl(int socket, const std::string& name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

bool StaysOnThisHost(int socket) {
  sockaddr_storage here{}, there{};
  socklen_t here_size = sizeof(here), there_size = sizeof(there);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&here), &here_size) == 0 &&
         getpeername(socket, reinterpret_cast<sockaddr*>(&there), &there_size) == 0 &&
         SameHost(here, there);
}

}  // namespace attnd
