#include "server/app/metrics_port.h"

#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <sstream>
#include <thread>
#include <utility>
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

constexpr char kStatusPage[] =
#include "server/app/status_page.inc"
    ;

// "[::1]:80" → "::1"
std::string HostOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return "127.0.0.1";
  const std::string host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

// The system's reason: CivetWeb does not tell it.
std::string WhyNot(const std::string& address, absl::string_view otherwise) {
  const absl::Status status = Listener::Open(address, absl::ZeroDuration()).status();
  return status.ok() ? absl::StrCat(address, ": ", otherwise) : std::string(status.message());
}

}  // namespace

class MetricsPort::Pages final : public CivetHandler {
 public:
  Pages(const Metrics& metrics, std::function<bool()> ready)
      : parts_(metrics.collectables()), ready_(std::move(ready)) {}

  bool handleGet(CivetServer*, mg_connection* connection) override {
    return Answer(connection, true);
  }
  bool handleHead(CivetServer*, mg_connection* connection) override {
    return Answer(connection, false);
  }

 private:
  bool Answer(mg_connection* connection, bool with_body) {
    const char* uri = mg_get_request_info(connection)->local_uri;
    const absl::string_view path = uri == nullptr ? "" : uri;
    if (path == "/metrics") {
      Send(connection, "200 OK", "text/plain; version=0.0.4; charset=utf-8", Text(), with_body);
    } else if (path == "/") {
      Send(connection, "200 OK", "text/html; charset=utf-8", kStatusPage, with_body);
    } else if (path == "/healthz") {
      const bool ready = ready_();
      Send(connection, ready ? "200 OK" : "503 Service Unavailable", "text/plain",
           ready ? "ok\n" : "not ready: draining, or a device is lost\n", with_body);
    } else {
      Send(connection, "404 Not Found", "text/plain", "there are /, /metrics and /healthz\n",
           with_body);
    }
    return true;
  }

  std::string Text() const {
    std::vector<prometheus::MetricFamily> families;
    for (const auto& part : parts_) {
      auto found = part->Collect();
      families.insert(families.end(), std::make_move_iterator(found.begin()),
                      std::make_move_iterator(found.end()));
    }
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, families);
    return text.str();
  }

  // The page needs nothing from elsewhere, and may ask this port alone.
  static void Send(mg_connection* connection, const char* status, const char* type,
                   const std::string& body, bool with_body) {
    mg_printf(
        connection,
        "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
        "Connection: close\r\n"
        "Content-Security-Policy: default-src 'self' 'unsafe-inline'\r\n"
        "X-Content-Type-Options: nosniff\r\n\r\n",
        status, type, body.size());
    if (with_body) mg_write(connection, body.data(), body.size());
  }

  const std::vector<std::shared_ptr<prometheus::Collectable>> parts_;
  const std::function<bool()> ready_;
};

absl::StatusOr<std::unique_ptr<MetricsPort>> MetricsPort::Open(const std::string& address,
                                                               const Metrics& metrics,
                                                               std::function<bool()> ready) {
  auto port = std::unique_ptr<MetricsPort>(new MetricsPort());
  port->pages_ = std::make_unique<Pages>(metrics, std::move(ready));
  try {  // CivetServer reports a port in use by throwing
    port->server_ = std::make_unique<CivetServer>(
        std::vector<std::string>{"listening_ports", address, "num_threads", kThreads,
                                 "request_timeout_ms", kRequestTimeoutMs});
    port->server_->addHandler("/", port->pages_.get());
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
  return port;
}

// CivetWeb looks whether it shall stop when somebody connects, else only every two seconds.
MetricsPort::~MetricsPort() {
  if (server_ == nullptr) return;
  std::atomic<bool> gone = false;
  std::thread end([&] {
    server_.reset();
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
