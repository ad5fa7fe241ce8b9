// Printable: text from servers and their metrics, made safe for a terminal. Control characters and
// bytes that are not UTF-8 become escapes such as \n or \x1b.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace attnd {

std::string Printable(absl::string_view text);

}  // namespace attnd
