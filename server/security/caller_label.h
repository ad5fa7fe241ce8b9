// CallerLabel: the name under which metrics count a caller.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace attnd {

// `caller`, as Authenticator says, if that is a name; else the kind of the peer's address, of which
// there are few: unix, loopback, private, public.
std::string CallerLabel(const std::string& caller, absl::string_view peer);

}  // namespace attnd
