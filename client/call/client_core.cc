#include "client/call/client_core.h"

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "client/channels/grpc_time.h"

namespace attnd {

void PrepareContext(const ClientOptions& options, absl::Time deadline,
                    const std::string& traceparent, grpc::ClientContext& context) {
  context.set_deadline(GrpcTime(deadline));
  context.set_wait_for_ready(options.wait_for_ready);
  if (!options.bearer_token.empty()) {
    context.AddMetadata("authorization", absl::StrCat("Bearer ", options.bearer_token));
  }
  if (!traceparent.empty()) context.AddMetadata("traceparent", traceparent);
}

}  // namespace attnd
