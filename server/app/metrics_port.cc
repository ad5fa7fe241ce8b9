#include "server/app/metrics_port.h"

#include <prometheus/text_serializer.h>

#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

constexpr char kStatusPage[] =
#include "server/app/status_page.inc"
    ;

using Collectables = std::vector<std::shared_ptr<prometheus::Collectable>>;

std::string MetricsTextOf(const Collectables& parts) {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& part : parts) {
    auto found = part->Collect();
    families.insert(families.end(), std::make_move_iterator(found.begin()),
                    std::make_move_iterator(found.end()));
  }
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, families);
  return text.str();
}

Page PageAt(absl::string_view path, const Collectables& parts, const MetricsPort::Health& health) {
  if (path == "/metrics") {
    return {.type = "text/plain; version=0.0.4; charset=utf-8", .body = MetricsTextOf(parts)};
  }
  if (path == "/") return {.type = "text/html; charset=utf-8", .body = kStatusPage};
  if (path == "/healthz") {
    if (health.ready()) return {.body = "ok\n"};
    return {.status = "503 Service Unavailable",
            .body = "not ready: draining, or a device is lost\n"};
  }
  if (path == "/livez") {
    const absl::Status alive = health.alive();
    if (alive.ok()) return {.body = "ok\n"};
    return {.status = "503 Service Unavailable", .body = absl::StrCat(alive.message(), "\n")};
  }
  return {.status = "404 Not Found", .body = "there are /, /metrics, /healthz and /livez\n"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsPort>> MetricsPort::Open(const std::string& address,
                                                               const Metrics& metrics,
                                                               Health health) {
  auto server = PageServer::Open(
      address, [parts = metrics.collectables(), health = std::move(health)](
                   absl::string_view path) { return PageAt(path, parts, health); });
  if (!server.ok()) {
    return absl::UnavailableError(absl::StrCat("--metrics_listen: ", server.status().message()));
  }
  return std::unique_ptr<MetricsPort>(new MetricsPort(*std::move(server)));
}

}  // namespace attnd
