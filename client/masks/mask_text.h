// ParseMask: a mask as the command line spells it.
//
//     longformer(64,64)     causal & (window(127,0) | stride(128))     ~documents(16)
//
//   mask    = term { "|" term }
//   term    = factor { "&" factor }
//   factor  = "~" factor | "(" mask ")" | name [ "(" argument { "," argument } ")" ]
//   argument= integer | integer ":" integer | word
//
// White space may stand anywhere. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/masks/mask_builder.h"

namespace attnd::masks {

// `keys`: of the problem, which documents(n) divides. Errors: INVALID_ARGUMENT
//   "character 12: expected \")\" or \",\", got \"&\""
absl::StatusOr<Mask> ParseMask(absl::string_view text, int64_t keys);

// A line for each name, "  window(left,right)   from left keys before ...".
std::string MaskNamesHelp();

}  // namespace attnd::masks
