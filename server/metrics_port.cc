#include "server/metrics_port.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

constexpr int kThreads = 2;
constexpr absl::Duration kKnockAgain = absl::Milliseconds(5);

// "[::1]:80" → "::1"
std::string HostOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return "127.0.0.1";
  const std::string host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsPort>> MetricsPort::Open(const std::string& address,
                                                               const Metrics& metrics) {
  auto port = std::unique_ptr<MetricsPort>(new MetricsPort());
  port->host_ = HostOf(address);
  try {  // prometheus-cpp reports a port in use by throwing
    port->exposer_ = std::make_unique<prometheus::Exposer>(address, kThreads);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for metrics on ", address, ": ", error.what()));
  }
  port->exposer_->RegisterCollectable(metrics.registry());
  port->exposer_->RegisterCollectable(metrics.sampled());
  return port;
}

// CivetWeb, which is the exposer's, looks whether it shall stop when somebody connects, else only
// every two seconds.
MetricsPort::~MetricsPort() {
  if (exposer_ == nullptr) return;
  const int port_number = port();
  std::atomic<bool> gone = false;
  std::thread end([&] {
    exposer_.reset();
    gone = true;
  });
  while (!gone) {
    Knock(port_number);
    absl::SleepFor(kKnockAgain);
  }
  end.join();
}

void MetricsPort::Knock(int port) const {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host_.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  const int knocker = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (knocker >= 0) {
    (void)connect(knocker, found->ai_addr, found->ai_addrlen);
    close(knocker);
  }
  freeaddrinfo(found);
}

}  // namespace attnd
