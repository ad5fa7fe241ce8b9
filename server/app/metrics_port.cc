#include "server/app/metrics_port.h"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "net/listener.h"

namespace attnd {
namespace {

// A connection that asks for nothing keeps a thread for this long. CivetWeb's 2 threads and 30 s
// would let two of them keep Prometheus, which waits for 10 s, out.
constexpr char kThreads[] = "8";
constexpr char kRequestTimeoutMs[] = "2000";
constexpr absl::Duration kKnockAgain = absl::Milliseconds(5);

// "[::1]:80" → "::1"
std::string HostOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return "127.0.0.1";
  const std::string host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

// The system's reason: the exposer does not tell it.
std::string WhyNot(const std::string& address, absl::string_view otherwise) {
  const absl::Status status = Listener::Open(address, absl::ZeroDuration()).status();
  return status.ok() ? absl::StrCat(address, ": ", otherwise) : std::string(status.message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsPort>> MetricsPort::Open(const std::string& address,
                                                               const Metrics& metrics) {
  auto port = std::unique_ptr<MetricsPort>(new MetricsPort());
  try {  // prometheus-cpp reports a port in use by throwing
    port->exposer_ = std::make_unique<prometheus::Exposer>(
        std::vector<std::string>{"listening_ports", address, "num_threads", kThreads,
                                 "request_timeout_ms", kRequestTimeoutMs});
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for metrics: ", WhyNot(address, error.what())));
  }
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  const std::string host = HostOf(address), number = std::to_string(port->port());
  if (getaddrinfo(host.c_str(), number.c_str(), &hints, &found) == 0) {
    port->own_address_.reset(found);
  }
  for (const auto& part : metrics.collectables()) port->exposer_->RegisterCollectable(part);
  return port;
}

// CivetWeb, which is the exposer's, looks whether it shall stop when somebody connects, else only
// every two seconds.
MetricsPort::~MetricsPort() {
  if (exposer_ == nullptr) return;
  std::atomic<bool> gone = false;
  std::thread end([&] {
    exposer_.reset();
    gone = true;
  });
  while (!gone) {
    Knock();
    absl::SleepFor(kKnockAgain);
  }
  end.join();
}

void MetricsPort::Knock() const {
  if (own_address_ == nullptr) return;
  const int knocker = socket(own_address_->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (knocker < 0) return;
  (void)connect(knocker, own_address_->ai_addr, own_address_->ai_addrlen);
  close(knocker);
}

}  // namespace attnd
