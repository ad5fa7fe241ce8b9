// The files that options name: whether they can be read, or made, and are what they should be.
// Looked at by --check_config and again at the start; later changes are read by those who watch the
// files. Errors: INVALID_ARGUMENT or NOT_FOUND naming the flag and the file.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/options.h"

namespace attnd {

// A certificate, a key that fits it, authorities. gRPC's file watcher would wait for a missing file
// for ever and serve nobody, and would fail every handshake with a key that does not fit.
absl::Status CheckTlsFiles(const TlsOptions& tls);

// When the first certificate in a PEM file ends; InfinitePast when there is none.
absl::Time CertificateExpiry(const std::string& path);

// These, the token file, and whether unix sockets and port files can be made where they are to be.
absl::Status CheckFiles(const ServerOptions& options);

}  // namespace attnd
