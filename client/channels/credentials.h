// MakeCredentials: ClientOptions → gRPC channel credentials, after checking everything that can be
// checked before a connection.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/types/client_options.h"

namespace attnd {

// Whether no other machine can see what is sent there: a unix socket, 127.0.0.0/8, ::1, localhost.
bool IsLocalAddress(absl::string_view address);

// INVALID_ARGUMENT naming the option; NOT_FOUND for a file that cannot be read.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options);

}  // namespace attnd
