#include "client/call/client_core.h"

#include "absl/strings/str_cat.h"

namespace attnd {

void PrepareContext(const ClientOptions& options, absl::Time deadline,
                    grpc::ClientContext& context) {
  context.set_deadline(absl::ToChronoTime(deadline));
  context.set_wait_for_ready(options.wait_for_ready);
  if (!options.bearer_token.empty()) {
    context.AddMetadata("authorization", absl::StrCat("Bearer ", options.bearer_token));
  }
}

}  // namespace attnd
