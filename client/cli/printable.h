// Printable: text of others (servers, their metrics) as a terminal may have it. Control characters,
// which a terminal would obey, and bytes that are not UTF-8 stand as \n or \x1b.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace attnd {

std::string Printable(absl::string_view text);

}  // namespace attnd
