// The files that options name: whether they can be read, or made, and are what they should be.
// Looked at by --check_config and again at the start; later changes are read by those who watch the
// files. Errors: INVALID_ARGUMENT or NOT_FOUND naming the flag and the file.
#pragma once

#include "absl/status/status.h"
#include "server/app/options.h"

namespace attnd {

// The certificate's files, the token file, and whether unix sockets and port files can be made
// where they are to be.
absl::Status CheckFiles(const ServerOptions& options);

}  // namespace attnd
