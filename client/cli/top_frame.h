// TopFrame: the difference of two samples of a daemon's metrics, as numbers, text and JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cli/metrics_text.h"

namespace attnd {

struct MethodRow {
  std::string method;
  double calls_per_second = 0, errors_per_second = 0, in_flight = 0;
  double p50_seconds = 0, p99_seconds = 0;  // of modules the compute time alone; NaN: no calls
};

struct DeviceRow {
  std::string device;
  bool up = false;
  double flops_per_second = 0;  // attention and modules
  double queue_estimated_seconds = 0;
  double p50_seconds = 0, p99_seconds = 0;              // of a launch's kernels; NaN: none
  double h2d_busy = 0, compute_busy = 0, d2h_busy = 0;  // shares of the time; GPUs only
  // GPUs only.
  double hbm_input_bytes = 0, hbm_output_bytes = 0, hbm_workspace_bytes = 0, hbm_lease_bytes = 0;
  double hbm_reserved_bytes = 0, leases = 0;
};

struct CallerRow {
  std::string caller;
  double calls_per_second = 0, errors_per_second = 0;
  double bytes_per_second = 0;  // both ways
  double compute = 0;           // seconds a second: shared launches by each call's work
};

struct TopFrame {
  std::vector<MethodRow> methods;
  std::vector<DeviceRow> devices;
  std::vector<CallerRow> callers;                       // the one that computes most first
  double received_per_second = 0, sent_per_second = 0;  // payload bytes
  double flops_per_second = 0;                          // attention and modules
  double launches_per_second = 0, calls_per_launch = 0;
  double queue_depth = 0, queue_estimated_seconds = 0;
  double admitted_bytes = 0, staging_used_bytes = 0, staging_capacity_bytes = 0;
  double rejected_per_second = 0, resident_bytes = 0;
  double leases = 0, lease_bytes = 0;                             // residuals kept now
  double lease_hits_per_second = 0, lease_misses_per_second = 0;  // of backward calls with a token
  double modules = 0, module_bytes = 0;                           // registered now
  double module_rows_per_second = 0, module_flops_per_second = 0, module_steps_per_second = 0;
  bool ready = false, draining = false;

  // `interval`: between the two samples.
  static TopFrame Between(const MetricsText& before, const MetricsText& now,
                          absl::Duration interval);
  // In lines of at most so many columns, 60 or more. Idle methods and callers are left out.
  void Print(std::ostream& out, bool color, int columns) const;
  nlohmann::ordered_json ToJson() const;
};

}  // namespace attnd
