#include "base/version.h"

#include "absl/strings/str_cat.h"
#include "base/version_commit.inc"  // defines kCommit

namespace attnd {

absl::string_view Commit() { return kCommit; }

std::string VersionString() { return absl::StrCat(kVersion, " (", kCommit, ")"); }

}  // namespace attnd
