// MetricsPort: the HTTP port that serves Metrics to Prometheus, from its opening until it goes.
// Threads: Open and destruction by one thread; scrapes come on its own.
// Errors: UNAVAILABLE when the address cannot be listened on.
#pragma once

#include <netdb.h>
#include <prometheus/exposer.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/metrics/metrics.h"

namespace attnd {

class MetricsPort {
 public:
  // `address` is "host:port", port 0 for any that is free.
  static absl::StatusOr<std::unique_ptr<MetricsPort>> Open(const std::string& address,
                                                           const Metrics& metrics);
  ~MetricsPort();
  int port() const { return exposer_->GetListeningPorts().front(); }

 private:
  MetricsPort() = default;
  void Knock() const;

  struct FreeAddress {
    void operator()(addrinfo* address) const { freeaddrinfo(address); }
  };
  std::unique_ptr<addrinfo, FreeAddress> own_address_;  // its port's; null: not known
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace attnd
