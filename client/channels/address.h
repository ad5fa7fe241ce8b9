// The addresses that a client may be given. gRPC alone would take "host" for host:443, and 65537
// for port 1.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd {

// INVALID_ARGUMENT for what is neither host:port nor a target of a scheme that gRPC knows (unix,
// dns, ipv4, ...).
absl::Status CheckAddress(absl::string_view address);

// Whether it is "host:port", with a port of 1..65535.
bool IsHostAndPort(absl::string_view address);

}  // namespace attnd
