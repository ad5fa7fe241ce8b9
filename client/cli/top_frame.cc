#include "client/cli/top_frame.h"

#include <algorithm>
#include <cmath>

#include "client/cli/table.h"

namespace attnd {
namespace {

// Rate: a counter's growth a second; a restart (a count that has fallen) counts from zero.
class Rate {
 public:
  Rate(const MetricsText& before, const MetricsText& now, absl::Duration interval)
      : before_(before), now_(now), seconds_(absl::ToDoubleSeconds(interval)) {}
  double operator()(absl::string_view name, const Labels& labels = {}) const {
    double earlier = before_.Sum(name, labels), later = now_.Sum(name, labels);
    return seconds_ <= 0 ? 0 : (later >= earlier ? later - earlier : later) / seconds_;
  }

 private:
  const MetricsText &before_, &now_;
  const double seconds_;
};

std::string QuantileText(double seconds) {
  return std::isnan(seconds) ? "-" : SecondsText(seconds);
}

// JSON has no NaN.
nlohmann::ordered_json QuantileJson(double seconds) {
  return std::isnan(seconds) ? nlohmann::ordered_json() : nlohmann::ordered_json(seconds);
}

MethodRow RowOf(const std::string& method, const MetricsText& before, const MetricsText& now,
                const Rate& rate) {
  constexpr char kHistogram[] = "attnd_request_duration_seconds";
  MethodRow row{.method = method};
  row.calls_per_second = rate("attnd_requests_total", {{"method", method}});
  row.errors_per_second =
      std::max(0.0, row.calls_per_second -
                        rate("attnd_requests_total", {{"method", method}, {"code", "OK"}}));
  row.in_flight = now.Sum("attnd_requests_in_flight", {{"method", method}});
  auto earlier = before.Buckets(kHistogram, {{"method", method}});
  auto later = now.Buckets(kHistogram, {{"method", method}});
  row.p50_seconds = QuantileBetween(earlier, later, 0.5);
  row.p99_seconds = QuantileBetween(earlier, later, 0.99);
  return row;
}

}  // namespace

TopFrame TopFrame::Between(const MetricsText& before, const MetricsText& now,
                           absl::Duration interval) {
  Rate rate(before, now, interval);
  TopFrame frame;
  for (const std::string& method : now.ValuesOf("attnd_requests_total", "method")) {
    frame.methods.push_back(RowOf(method, before, now, rate));
  }
  frame.received_per_second = rate("attnd_received_bytes_total");
  frame.sent_per_second = rate("attnd_sent_bytes_total");
  frame.flops_per_second = rate("attnd_kernel_flops_total");
  frame.launches_per_second = rate("attnd_batch_requests_count");
  double launched = rate("attnd_batch_requests_sum");
  frame.calls_per_launch = frame.launches_per_second > 0 ? launched / frame.launches_per_second : 0;
  frame.queue_depth = now.Sum("attnd_queue_depth");
  frame.queue_estimated_seconds = now.Sum("attnd_queue_estimated_seconds");
  frame.admitted_bytes = now.Sum("attnd_admitted_bytes");
  frame.staging_used_bytes = now.Sum("attnd_staging_pool_used_bytes");
  frame.staging_capacity_bytes = now.Sum("attnd_staging_pool_capacity_bytes");
  frame.rejected_per_second = rate("attnd_rejected_requests_total");
  frame.resident_bytes = now.Sum("process_resident_memory_bytes");
  frame.leases = now.Sum("attnd_leases_active");
  frame.lease_bytes = now.Sum("attnd_lease_bytes");
  frame.lease_hits_per_second = rate("attnd_lease_lookups_total", {{"result", "hit"}});
  frame.lease_misses_per_second =
      std::max(0.0, rate("attnd_lease_lookups_total") - frame.lease_hits_per_second);
  frame.ready = now.Sum("attnd_ready") > 0;
  frame.draining = now.Sum("attnd_draining") > 0;
  return frame;
}

void TopFrame::Print(std::ostream& out, bool color) const {
  const char* state = draining ? "DRAINING" : ready ? "READY" : "NOT READY";
  out << Colored(state,
                 draining ? Color::kYellow
                 : ready  ? Color::kGreen
                          : Color::kRed,
                 color)
      << "   in " << BytesText(received_per_second) << "/s   out " << BytesText(sent_per_second)
      << "/s   compute " << FlopsText(flops_per_second) << "   memory " << BytesText(resident_bytes)
      << "\nqueue " << NumberText(queue_depth) << " calls, " << SecondsText(queue_estimated_seconds)
      << "   launches " << NumberText(launches_per_second) << "/s of "
      << NumberText(calls_per_launch) << " calls   rejected " << NumberText(rejected_per_second)
      << "/s\nadmitted " << BytesText(admitted_bytes) << "   staging "
      << BytesText(staging_used_bytes) << " of " << BytesText(staging_capacity_bytes) << "\nleases "
      << NumberText(leases) << ", " << BytesText(lease_bytes) << "   hits "
      << NumberText(lease_hits_per_second) << "/s   misses " << NumberText(lease_misses_per_second)
      << "/s\n\n";
  Table table({"method", "calls/s", "errors/s", "in flight", "p50", "p99"});
  for (const MethodRow& row : methods) {
    table.Add({row.method, NumberText(row.calls_per_second),
               Cell(NumberText(row.errors_per_second),
                    row.errors_per_second > 0 ? Color::kRed : Color::kNone),
               NumberText(row.in_flight), QuantileText(row.p50_seconds),
               QuantileText(row.p99_seconds)});
  }
  table.Print(out, color);
}

nlohmann::ordered_json TopFrame::ToJson() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const MethodRow& row : methods) {
    rows.push_back({{"method", row.method},
                    {"calls_per_second", row.calls_per_second},
                    {"errors_per_second", row.errors_per_second},
                    {"in_flight", row.in_flight},
                    {"p50_seconds", QuantileJson(row.p50_seconds)},
                    {"p99_seconds", QuantileJson(row.p99_seconds)}});
  }
  return {{"ready", ready},
          {"draining", draining},
          {"methods", rows},
          {"received_bytes_per_second", received_per_second},
          {"sent_bytes_per_second", sent_per_second},
          {"flops_per_second", flops_per_second},
          {"launches_per_second", launches_per_second},
          {"calls_per_launch", calls_per_launch},
          {"queue_depth", queue_depth},
          {"queue_estimated_seconds", queue_estimated_seconds},
          {"rejected_per_second", rejected_per_second},
          {"admitted_bytes", admitted_bytes},
          {"staging_used_bytes", staging_used_bytes},
          {"staging_capacity_bytes", staging_capacity_bytes},
          {"leases", leases},
          {"lease_bytes", lease_bytes},
          {"lease_hits_per_second", lease_hits_per_second},
          {"lease_misses_per_second", lease_misses_per_second},
          {"resident_bytes", resident_bytes}};
}

}  // namespace attnd
