#include "client/cli/top_frame.h"

#include <algorithm>
#include <cmath>

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

// The service Modules times Forward and Backward alone.
MethodRow ModuleRowOf(const std::string& method, const MetricsText& before, const MetricsText& now,
                      const Rate& rate) {
  constexpr char kCalls[] = "attnd_module_calls_total";
  constexpr char kHistogram[] = "attnd_module_duration_seconds";
  MethodRow row{.method = "module " + method};
  row.calls_per_second = rate(kCalls, {{"method", method}});
  const double good = rate(kCalls, {{"method", method}, {"code", "OK"}});
  row.errors_per_second = std::max(0.0, row.calls_per_second - good);
  const char* direction = method == "Forward"    ? "forward"
                          : method == "Backward" ? "backward"
                                                 : "none";
  const Labels labels = {{"direction", direction}, {"stage", "compute"}};
  auto earlier = before.Buckets(kHistogram, labels), later = now.Buckets(kHistogram, labels);
  row.p50_seconds = QuantileBetween(earlier, later, 0.5);
  row.p99_seconds = QuantileBetween(earlier, later, 0.99);
  return row;
}

double FlopsPerSecond(const Rate& rate, const Labels& labels = {}) {
  return rate("attnd_kernel_flops_total", labels) + rate("attnd_module_flops_total", labels);
}

DeviceRow DeviceRowOf(const std::string& device, const MetricsText& before, const MetricsText& now,
                      const Rate& rate) {
  constexpr char kHistogram[] = "attnd_kernel_duration_seconds";
  const Labels labels = {{"device", device}};
  DeviceRow row{.device = device};
  row.up = now.Sum("attnd_gpu_up", labels) > 0;
  row.flops_per_second = FlopsPerSecond(rate, labels);
  row.queue_estimated_seconds = now.Sum("attnd_queue_estimated_seconds", labels);
  auto earlier = before.Buckets(kHistogram, labels), later = now.Buckets(kHistogram, labels);
  row.p50_seconds = QuantileBetween(earlier, later, 0.5);
  row.p99_seconds = QuantileBetween(earlier, later, 0.99);
  auto busy = [&](const char* role) {
    return rate("attnd_stream_busy_seconds_total", {{"device", device}, {"role", role}});
  };
  row.h2d_busy = busy("h2d");
  row.compute_busy = busy("compute");
  row.d2h_busy = busy("d2h");
  auto used = [&](const char* purpose) {
    return now.Sum("attnd_hbm_pool_used_bytes", {{"device", device}, {"purpose", purpose}});
  };
  row.hbm_input_bytes = used("input");
  row.hbm_output_bytes = used("output");
  row.hbm_workspace_bytes = used("workspace");
  row.hbm_lease_bytes = used("lease");
  row.leases = now.Sum("attnd_leases_active", labels);
  row.hbm_reserved_bytes = now.Sum("attnd_hbm_pool_reserved_bytes", labels);
  return row;
}

CallerRow CallerRowOf(const std::string& caller, const Rate& rate) {
  const Labels labels = {{"caller", caller}};
  CallerRow row{.caller = caller};
  row.calls_per_second = rate("attnd_caller_requests_total", labels);
  row.errors_per_second =
      rate("attnd_caller_requests_total", {{"caller", caller}, {"result", "error"}});
  row.bytes_per_second = rate("attnd_caller_bytes_total", labels);
  row.compute = rate("attnd_caller_compute_seconds_total", labels);
  return row;
}

nlohmann::ordered_json DeviceJson(const DeviceRow& row) {
  return {{"device", row.device},
          {"up", row.up},
          {"flops_per_second", row.flops_per_second},
          {"queue_estimated_seconds", row.queue_estimated_seconds},
          {"kernel_p50_seconds", QuantileJson(row.p50_seconds)},
          {"kernel_p99_seconds", QuantileJson(row.p99_seconds)},
          {"h2d_busy", row.h2d_busy},
          {"compute_busy", row.compute_busy},
          {"d2h_busy", row.d2h_busy},
          {"hbm_input_bytes", row.hbm_input_bytes},
          {"hbm_output_bytes", row.hbm_output_bytes},
          {"hbm_workspace_bytes", row.hbm_workspace_bytes},
          {"hbm_lease_bytes", row.hbm_lease_bytes},
          {"leases", row.leases},
          {"hbm_reserved_bytes", row.hbm_reserved_bytes}};
}

}  // namespace

TopFrame TopFrame::Between(const MetricsText& before, const MetricsText& now,
                           absl::Duration interval) {
  Rate rate(before, now, interval);
  TopFrame frame;
  for (const std::string& method : now.ValuesOf("attnd_requests_total", "method")) {
    frame.methods.push_back(RowOf(method, before, now, rate));
  }
  for (const std::string& method : now.ValuesOf("attnd_module_calls_total", "method")) {
    frame.methods.push_back(ModuleRowOf(method, before, now, rate));
  }
  for (const std::string& device : now.ValuesOf("attnd_gpu_up", "device")) {
    frame.devices.push_back(DeviceRowOf(device, before, now, rate));
  }
  for (const std::string& caller : now.ValuesOf("attnd_caller_requests_total", "caller")) {
    frame.callers.push_back(CallerRowOf(caller, rate));
  }
  std::stable_sort(frame.callers.begin(), frame.callers.end(),
                   [](const CallerRow& a, const CallerRow& b) { return a.compute > b.compute; });
  frame.received_per_second = rate("attnd_received_bytes_total");
  frame.sent_per_second = rate("attnd_sent_bytes_total");
  frame.flops_per_second = FlopsPerSecond(rate);
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
  frame.modules = now.Sum("attnd_modules");
  frame.module_bytes = now.Sum("attnd_module_bytes");
  frame.module_rows_per_second = rate("attnd_module_rows_total");
  frame.module_flops_per_second = rate("attnd_module_flops_total");
  frame.module_steps_per_second = rate("attnd_steps_total", {{"result", "applied"}});
  frame.ready = now.Sum("attnd_ready") > 0;
  frame.draining = now.Sum("attnd_draining") > 0;
  return frame;
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
  nlohmann::ordered_json device_rows = nlohmann::ordered_json::array();
  for (const DeviceRow& row : devices) device_rows.push_back(DeviceJson(row));
  nlohmann::ordered_json caller_rows = nlohmann::ordered_json::array();
  for (const CallerRow& row : callers) {
    caller_rows.push_back({{"caller", row.caller},
                           {"calls_per_second", row.calls_per_second},
                           {"errors_per_second", row.errors_per_second},
                           {"bytes_per_second", row.bytes_per_second},
                           {"compute", row.compute}});
  }
  return {{"ready", ready},
          {"draining", draining},
          {"methods", rows},
          {"devices", device_rows},
          {"callers", caller_rows},
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
          {"modules", modules},
          {"module_bytes", module_bytes},
          {"module_rows_per_second", module_rows_per_second},
          {"module_flops_per_second", module_flops_per_second},
          {"module_steps_per_second", module_steps_per_second},
          {"resident_bytes", resident_bytes}};
}

}  // namespace attnd
