// MetricsPort: the HTTP port for people and their tools, from its opening until it goes. GET or
// HEAD: /metrics, Prometheus' text; /, a page that shows them; /healthz, 200 or 503 while calls
// should go elsewhere; /livez, 200 or 503 when only a restart helps. Anything else: 404.
// Threads: Open and destruction by one thread; requests come on its own.
// Errors: UNAVAILABLE when the address cannot be listened on.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/page_server.h"
#include "server/metrics/metrics.h"

namespace attnd {

class MetricsPort {
 public:
  // Asked by any thread, until the port goes.
  struct Health {
    std::function<bool()> ready;
    std::function<absl::Status()> alive;
  };
  // `address` is "host:port", port 0 for any that is free.
  static absl::StatusOr<std::unique_ptr<MetricsPort>> Open(const std::string& address,
                                                           const Metrics& metrics,
                                                           Health health);
  int port() const { return server_->port(); }

 private:
  explicit MetricsPort(std::unique_ptr<PageServer> server) : server_(std::move(server)) {}

  const std::unique_ptr<PageServer> server_;
};

}  // namespace attnd
