// TcpListener: the daemon's own accept loop for one TCP address; connections are handed to gRPC.
//
// gRPC 1.51's own listener never accepts again once it has run out of descriptors, and takes every
// connection that comes. This one waits and goes on, and lets its owner refuse a connection before
// it costs anything.
//
// Threads: Open, Start and Stop by one; `on_connection` is called from the listener's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace attnd {

class TcpListener {
 public:
  // "host:port" with a name, an IPv4 address or an IPv6 address in brackets; "[::]" takes both
  // families; port 0: a free one. All addresses of a name are listened on. `user_timeout`: what was
  // sent and is not acknowledged for this long ends its connection. UNAVAILABLE naming the address
  // when the port is in use or the name has no address.
  static absl::StatusOr<std::unique_ptr<TcpListener>> Open(const std::string& address,
                                                           absl::Duration user_timeout);
  ~TcpListener() { Stop(); }
  TcpListener(const TcpListener&) = delete;
  TcpListener& operator=(const TcpListener&) = delete;

  int port() const { return port_; }

  // Accepts until Stop; `on_connection` owns the socket that it is given, which does not block.
  void Start(std::function<void(int socket)> on_connection);
  // Closes the port. No call of `on_connection` after it.
  void Stop();

 private:
  TcpListener() = default;
  absl::Status Listen(const std::string& host, const std::string& port,
                      absl::Duration user_timeout);
  void Run();
  void AcceptAll(int listener);
  bool StoppedWithin(int ms) const;

  std::vector<int> sockets_;
  int port_ = 0;
  int stop_event_ = -1;
  std::function<void(int socket)> on_connection_;
  std::thread thread_;
};

}  // namespace attnd
