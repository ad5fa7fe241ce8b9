// ReadWholeFile, WriteWholeFile: a file that the user names, at once. NOT_FOUND names the option,
// if one is given, the path and the system's reason: "--token_file: cannot read /etc/t: No such
// file or directory". Any thread.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, absl::string_view option = "");
absl::Status WriteWholeFile(const std::string& path, absl::string_view bytes,
                            absl::string_view option = "");

}  // namespace attnd
