// FieldError: what is wrong with a description from outside, by the wire's path.
//     block[0].op[3].linear.weight: expected [768, 768], got [768, 3072]
// Pure functions; any thread.
#pragma once

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attnd {

template <class Expected, class Got>
absl::Status WrongField(absl::string_view path, const Expected& expected, const Got& got) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": expected ", expected, ", got ", got));
}

inline absl::Status FieldInRange(absl::string_view path, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return WrongField(path, absl::StrCat(low, "..", high), value);
}

inline absl::Status FieldIsFinite(absl::string_view path, double value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return WrongField(path, "a finite number", value);
}

}  // namespace attnd
