// The command line of attnd → ServerOptions. Unknown flags are refused; every flag may also stand
// in a file given by --config (INI, one "flag = value" a line).
#pragma once

#include <ostream>

#include "absl/status/statusor.h"
#include "server/app/options.h"

namespace attnd {

// The command line asks for one of these besides options.
enum class FlagAction {
  kServe,
  kCheckConfig,  // say whether the options are right, and stop
  kPrinted,      // --help or --version: done
};

struct Flags {
  FlagAction action = FlagAction::kServe;
  ServerOptions options;
};

// `version` is what --version prints. Help and version go to `out`. InvalidArgument says what is
// wrong; options that parse have also passed CheckOptions.
absl::StatusOr<Flags> ParseFlags(int argc, const char* const* argv, absl::string_view version,
                                 std::ostream& out);

}  // namespace attnd
