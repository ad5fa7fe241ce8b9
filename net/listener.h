// Listener: the daemon's own accept loop for one address; connections are handed to gRPC.
//
// gRPC 1.51's own listener never accepts again once it has run out of descriptors, and takes every
// connection that comes. This one waits and goes on, and lets its owner refuse a connection before
// it costs anything.
//
// Threads: Open, Start and Stop by one; `on_connection` is called from the listener's thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "net/file_descriptor.h"
#include "net/unix_socket.h"

namespace attnd {

class Listener {
 public:
  // "host:port" with a name, an IPv4 address or an IPv6 address in brackets; "[::]" takes both
  // families; port 0: a free one. All addresses of a name are listened on. `user_timeout`: what was
  // sent and is not acknowledged for this long ends its connection. UNAVAILABLE naming the address
  // when the port is in use or the name has no address.
  // "unix:PATH" and "unix-abstract:NAME": a socket of this host; one that a process listens on is
  // in use, one that is left over is replaced.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const std::string& address,
                                                        absl::Duration user_timeout);
  ~Listener() { Stop(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const { return port_; }  // 0: a unix socket

  // Accepts until Stop; `on_connection` owns the socket that it is given, which does not block.
  void Start(std::function<void(int socket)> on_connection);
  // Closes the port. No call of `on_connection` after it.
  void Stop();

 private:
  Listener() = default;
  absl::Status Listen(const std::string& host, const std::string& port,
                      absl::Duration user_timeout);
  void Run();
  void AcceptAll(int listener);
  bool StoppedWithin(int ms) const;

  std::vector<FileDescriptor> sockets_;
  int port_ = 0;
  std::optional<UnixSocket> unix_socket_;  // its descriptor is among sockets_
  FileDescriptor stop_event_;
  std::function<void(int socket)> on_connection_;
  std::thread thread_;
};

}  // namespace attnd
