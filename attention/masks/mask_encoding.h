// The bytes of a mask's parts: what its id is the hash of, and the order of operands. Each part is
// a tag, then its fields in order: integers little endian, lists as count, width and entries of the
// narrowest of 1, 2 and 4 bytes. No encoding is the beginning of another of the same type.
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

// Names for pattern_ref(n): names[n], or the number n where there are no names.
using PatternNames = std::vector<std::string>;

std::string EncodeExpr(const MaskExpr& expr, const PatternNames& names);
std::string EncodePattern(const MaskPattern& pattern, const PatternNames& names);
// Extents, empty_row, patterns, pattern_of.
std::string EncodeMask(const MaskSpec& canonical);

std::array<uint8_t, 32> Sha256(absl::string_view bytes);

}  // namespace attnd
