// Names this build: the release, set here by hand, and the commit it was built from, stamped by
// Bazel (base/version_status.sh). Everything that names its version asks here: --version,
// GetServerInfo, build_info, the bundle. Any thread.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace attnd {

// Semantic version of the release.
inline constexpr absl::string_view kVersion = "0.1.0";

// 12 hexadecimal digits, "-dirty" after them when the sources differ from that commit; "unknown"
// when built outside a git checkout.
absl::string_view Commit();

// "0.1.0 (1a2b3c4d5e6f)".
std::string VersionString();

}  // namespace attnd
