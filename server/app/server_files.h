// The files that options name: whether they can be read, or made, and are what they should be,
// which --check_config and the start look at; and those that tell ports. Errors: INVALID_ARGUMENT
// or NOT_FOUND naming the flag and the file.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/app/options.h"

namespace attnd {

// The certificate's files, the token file, and whether unix sockets and port files can be made
// where they are to be.
absl::Status CheckFiles(const ServerOptions& options);

// Readers of a plain file see either none or all of the text. A link, a pipe or a device
// (/dev/stdout) is written to where it is. Errors: UNAVAILABLE.
absl::Status WritePorts(const std::string& path, const std::string& text);

// Those of an earlier start: a reader that waits for the file must not see an old port.
void RemovePortFiles(const ServerOptions& options);

}  // namespace attnd
