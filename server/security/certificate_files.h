// The files of TlsOptions: whether they can be read and fit each other, and until when they hold.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/security/tls_options.h"

namespace attnd {

// A certificate, a key that fits it, authorities. gRPC's file watcher would wait for a missing file
// for ever and serve nobody, and would fail every handshake with a key that does not fit.
absl::Status CheckTlsFiles(const TlsOptions& tls);

// When the first certificate in a PEM file ends; InfinitePast when there is none.
absl::Time CertificateExpiry(const std::string& path);

// Whether the certificates hold at `now`: INVALID_ARGUMENT naming the flag, the file and since or
// until when. The files are those that CheckTlsFiles has found right.
absl::Status CheckCertificateTimes(const TlsOptions& tls, absl::Time now);

// INVALID_ARGUMENT "--flag: expected `expected`, got `path`".
absl::Status WrongFile(absl::string_view flag, absl::string_view expected, const std::string& path);

}  // namespace attnd
