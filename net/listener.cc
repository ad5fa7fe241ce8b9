#include "net/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "net/listen_address.h"

namespace attnd {
namespace {

constexpr int kBacklog = 1024;
// After this accept is tried again where descriptors or memory were lacking.
constexpr int kShortageMs = 20;

absl::Status Unavailable(absl::string_view what, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", what, ": ", why));
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> Resolve(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  if (error != 0) return Unavailable(absl::StrCat(host, ":", port), gai_strerror(error));
  return Addresses(list);
}

void SetOption(int socket, int level, int option, int value) {
  // One that this kernel lacks costs latency or an hour's patience, not the service.
  (void)setsockopt(socket, level, option, &value, sizeof(value));
}

int PortOf(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void SetPort(sockaddr_storage& address, int port) {
  uint16_t wire = htons(static_cast<uint16_t>(port));
  if (address.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = wire;
  } else {
    reinterpret_cast<sockaddr_in&>(address).sin_port = wire;
  }
}

// A listening socket on `address`; errno says why there is none. Options set here are inherited by
// the connections.
int ListenOn(const addrinfo& address, int port, absl::Duration user_timeout) {
  int socket = ::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
  if (socket < 0) return -1;
  SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT,
            static_cast<int>(absl::ToInt64Milliseconds(user_timeout)));
  if (address.ai_family == AF_INET6) SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  sockaddr_storage to{};
  std::memcpy(&to, address.ai_addr, address.ai_addrlen);
  SetPort(to, port);
  if (bind(socket, reinterpret_cast<sockaddr*>(&to), address.ai_addrlen) == 0 &&
      listen(socket, kBacklog) == 0) {
    return socket;
  }
  int why = errno;
  close(socket);
  errno = why;
  return -1;
}

int BoundPort(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  CHECK(getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  return PortOf(address);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const std::string& address,
                                                         absl::Duration user_timeout) {
  std::unique_ptr<Listener> listener(new Listener);
  listener->stop_event_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  CHECK(listener->stop_event_.valid()) << "eventfd";
  if (IsUnixAddress(address)) {
    ASSIGN_OR_RETURN(UnixSocket socket, UnixSocket::Listen(address, SOCK_STREAM, kBacklog));
    listener->sockets_.push_back(socket.TakeSocket());
    listener->unix_socket_.emplace(std::move(socket));
    return listener;
  }
  size_t colon = address.rfind(':');
  if (colon == std::string::npos) return Unavailable(address, "no port");
  absl::string_view host = absl::string_view(address).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  RETURN_IF_ERROR(listener->Listen(std::string(host), address.substr(colon + 1), user_timeout));
  return listener;
}

// A port in use on one address of several is a fault too: callers would reach somebody else there.
absl::Status Listener::Listen(const std::string& host, const std::string& port,
                              absl::Duration user_timeout) {
  ASSIGN_OR_RETURN(Addresses addresses, Resolve(host, port));
  sockaddr_storage first{};
  std::memcpy(&first, addresses->ai_addr, addresses->ai_addrlen);
  port_ = PortOf(first);
  std::string why = "no address";
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    FileDescriptor socket(ListenOn(*one, port_, user_timeout));
    if (!socket.valid()) {
      why = std::strerror(errno);
      if (errno == EADDRINUSE || errno == EACCES) return Unavailable(host + ":" + port, why);
      continue;  // a family that this machine lacks
    }
    if (port_ == 0) port_ = BoundPort(socket.get());
    sockets_.push_back(std::move(socket));
  }
  return sockets_.empty() ? Unavailable(host + ":" + port, why) : absl::OkStatus();
}

void Listener::Start(std::function<void(int socket)> on_connection) {
  on_connection_ = std::move(on_connection);
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    uint64_t one = 1;
    CHECK(write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
    thread_.join();
  }
  unix_socket_.reset();  // its file goes before its port
  sockets_.clear();
}

void Listener::Run() {
  std::vector<pollfd> waiting = {{stop_event_.get(), POLLIN, 0}};
  for (const FileDescriptor& socket : sockets_) waiting.push_back({socket.get(), POLLIN, 0});
  while (true) {
    if (poll(waiting.data(), waiting.size(), -1) < 0) continue;  // a signal
    if (waiting.front().revents != 0) return;
    for (const pollfd& one : waiting) {
      if (one.revents != 0) AcceptAll(one.fd);
    }
  }
}

bool Listener::StoppedWithin(int ms) const {
  pollfd stop{stop_event_.get(), POLLIN, 0};
  return poll(&stop, 1, ms) > 0;
}

void Listener::AcceptAll(int listener) {
  while (!StoppedWithin(0)) {
    int socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket >= 0) {
      on_connection_(socket);
      continue;
    }
    if (errno == EAGAIN) return;
    bool shortage = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (shortage && StoppedWithin(kShortageMs)) return;
    // Anything else is the fault of a connection that has gone already (accept(2)).
  }
}

}  // namespace attnd
