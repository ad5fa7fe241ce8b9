#include "server/metrics/trace_context.h"

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"

namespace attnd {
namespace {

constexpr size_t kTrace = 3, kParent = 36, kFlags = 53, kLength = 55;  // where they begin

bool IsHex(absl::string_view text) {
  return absl::c_all_of(
      text, [](unsigned char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); });
}

bool IsId(absl::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != absl::string_view::npos;
}

}  // namespace

TraceContext ParseTraceparent(absl::string_view text) {
  if (text.size() < kLength || text[kTrace - 1] != '-' || text[kParent - 1] != '-' ||
      text[kFlags - 1] != '-') {
    return {};
  }
  const absl::string_view version = text.substr(0, 2), flags = text.substr(kFlags, 2);
  const absl::string_view trace = text.substr(kTrace, 32), parent = text.substr(kParent, 16);
  // Later versions may go on after another dash.
  const bool ends =
      version == "00" ? text.size() == kLength : text.size() == kLength || text[kLength] == '-';
  if (!ends || !IsHex(version) || version == "ff" || !IsId(trace) || !IsId(parent) ||
      !IsHex(flags)) {
    return {};
  }
  const unsigned char low = flags[1];
  const int value = absl::ascii_isdigit(low) ? low - '0' : low - 'a' + 10;
  return {std::string(trace), std::string(parent), (value & 1) != 0};
}

}  // namespace attnd
