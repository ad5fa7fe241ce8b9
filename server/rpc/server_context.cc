#include "server/rpc/server_context.h"

#include <grpc/support/time.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "server/call/status_details.h"

namespace attnd {

absl::Time DeadlineOf(const grpc::ServerContextBase& context) {
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_MONOTONIC);
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) {
    return absl::InfiniteFuture();
  }
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  return SteadyNow() + absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

TraceContext TraceOf(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find("traceparent");
  if (found == context.client_metadata().end()) return {};
  return ParseTraceparent({found->second.data(), found->second.size()});
}

void AddPushback(const absl::Status& status, grpc::ServerContextBase& context) {
  std::optional<absl::Duration> delay = RetryAfterOf(status);
  if (!delay.has_value()) return;
  context.AddTrailingMetadata("grpc-retry-pushback-ms",
                              absl::StrCat(absl::ToInt64Milliseconds(*delay)));
}

}  // namespace attnd
