// Addresses that a daemon listens on: "host:port", "unix:PATH", "unix-abstract:NAME". Any thread.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace attnd {

// "unix:/path" and "unix-abstract:name" are sockets of this machine.
bool IsUnixAddress(absl::string_view address);
// The file of "unix:PATH" or "unix:///PATH"; empty for other addresses.
std::string UnixPath(absl::string_view address);
// Unix sockets, 127.0.0.0/8, ::1 and localhost.
bool IsLoopbackAddress(absl::string_view address);
// Whether one of them is not this host's alone.
bool ServesOtherHosts(const std::vector<std::string>& addresses);

}  // namespace attnd
