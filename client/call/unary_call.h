// Small calls about one address, without shards or retries: GetServerInfo and health.
#pragma once

#include <google/protobuf/message_lite.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/types/call_options.h"
#include "client/types/server_info.h"

namespace attnd {

// A proxy routes by this, beside the method.
using CallMetadata = std::vector<std::pair<std::string, std::string>>;

// `request`: a serialised message. Of `options` they take stop and poll_hook.
absl::Status CallUnary(const ClientCore& core, int address, const std::string& method,
                       const std::string& request, absl::Time deadline, const CallOptions& options,
                       google::protobuf::MessageLite& reply, const CallMetadata& metadata = {});

// The same call to each of these addresses at once; their replies in the same order.
std::vector<absl::StatusOr<std::string>> CallEach(const ClientCore& core,
                                                  const std::vector<int>& addresses,
                                                  const std::string& method,
                                                  const std::string& request, absl::Time deadline,
                                                  const CallOptions& options,
                                                  const CallMetadata& metadata = {});

// The same over each of these connections.
std::vector<absl::StatusOr<std::string>> CallOverEach(
    const ClientCore& core, const std::vector<std::shared_ptr<Connection>>& connections,
    const std::string& method, const std::string& request, absl::Time deadline,
    const CallOptions& options, const CallMetadata& metadata = {});

// grpc.health.v1.Health/Check of the whole server.
absl::StatusOr<Health> CallHealthCheck(const ClientCore& core, int address, absl::Time deadline,
                                       const CallOptions& options);

}  // namespace attnd
