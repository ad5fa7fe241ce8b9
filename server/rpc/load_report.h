// LoadReport: what answers of all services tell of the server's load: in an ORCA load report for
// proxies and gRPC's balancers, which gRPC hides from a caller.
#pragma once

#include <grpcpp/server_context.h>

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

}  // namespace attnd
