// MetricsPort: the HTTP port for people and their tools, from its opening until it goes. GET or
// HEAD: /metrics, Prometheus' text; /, a page that shows them; /healthz, 200 or 503 while calls
// should go elsewhere. Anything else: 404.
// Threads: Open and destruction by one thread; requests come on its own.
// Errors: UNAVAILABLE when the address cannot be listened on.
#pragma once

#include <CivetServer.h>
#include <netdb.h>
#include <prometheus/collectable.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/metrics/metrics.h"

namespace attnd {

class MetricsPort {
 public:
  // `address` is "host:port", port 0 for any that is free. `ready`: any thread, until this goes.
  static absl::StatusOr<std::unique_ptr<MetricsPort>> Open(const std::string& address,
                                                           const Metrics& metrics,
                                                           std::function<bool()> ready);
  ~MetricsPort();
  int port() const { return server_->getListeningPorts().front(); }

 private:
  class Pages;
  MetricsPort() = default;
  void Knock() const;

  struct FreeAddress {
    void operator()(addrinfo* address) const { freeaddrinfo(address); }
  };
  std::unique_ptr<addrinfo, FreeAddress> own_address_;  // its port's; null: not known
  std::unique_ptr<CivetHandler> pages_;                 // outlives the server
  std::unique_ptr<CivetServer> server_;
};

}  // namespace attnd
