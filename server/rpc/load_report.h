// LoadReport: what answers of all services tell of the server's load: in an ORCA load report for
// proxies and gRPC's balancers, which gRPC hides from a caller.
#pragma once

#include <grpcpp/server_context.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "proto/xds/data/orca/v3/orca_load_report.pb.h"
#include "server/rpc/calls.h"

namespace attnd {

// With the rates from which a weight is made: calls a second over the devices' use.
inline xds::data::orca::v3::OrcaLoadReport LoadReportOf(const Calls& calls) {
  const RecentWork::Rates rates = calls.recent_work().rates();
  xds::data::orca::v3::OrcaLoadReport report;
  report.set_rps_fractional(rates.calls);
  report.set_application_utilization(rates.busy);
  return report;
}

// Before the call is finished.
inline void AddLoadReport(const xds::data::orca::v3::OrcaLoadReport& report,
                          grpc::ServerContextBase& context) {
  context.AddTrailingMetadata("endpoint-load-metrics-bin", report.SerializeAsString());
}

// Tells a caller of attention the queue of the least loaded device, which a further call would get.
inline void AddQueue(const Calls& calls, grpc::ServerContextBase& context) {
  double seconds = std::numeric_limits<double>::infinity();
  for (int device = 0; device < calls.device_count(); ++device) {
    seconds = std::min(seconds, calls.QueueSeconds(device));
  }
  xds::data::orca::v3::OrcaLoadReport report = LoadReportOf(calls);
  (*report.mutable_named_metrics())["attnd.queue_seconds"] = seconds;
  AddLoadReport(report, context);
  context.AddTrailingMetadata("attnd-queue-seconds", absl::StrCat(seconds));
}

}  // namespace attnd
