#include "base/flag_kinds.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

constexpr char kSmaller[] = "a number closer to 0";

std::string Complaint(absl::string_view expected, absl::string_view got) {
  return absl::StrCat("expected ", expected, ", got \"", got, "\"");
}

// Decimal, or hexadecimal after 0x. CLI11 reads what else begins with 0 as octal.
bool IsWhole(absl::string_view digits) {
  bool hexadecimal = absl::ConsumePrefix(&digits, "0x") || absl::ConsumePrefix(&digits, "0X");
  if (digits.empty() || (!hexadecimal && digits.size() > 1 && digits[0] == '0')) return false;
  for (char c : digits) {
    if (!(hexadecimal ? absl::ascii_isxdigit(c) : absl::ascii_isdigit(c))) return false;
  }
  return true;
}

// CLI11 takes the largest there is for a larger one.
bool Fits64Bits(const std::string& text, bool has_sign) {
  errno = 0;
  has_sign ? static_cast<void>(std::strtoll(text.c_str(), nullptr, 0))
           : static_cast<void>(std::strtoull(text.c_str(), nullptr, 0));
  return errno == 0;
}

std::string CheckWhole(const std::string& text) {
  absl::string_view digits = text;
  if (!absl::ConsumePrefix(&digits, "-")) absl::ConsumePrefix(&digits, "+");
  if (!IsWhole(digits)) return Complaint("a whole number", text);
  return Fits64Bits(text, true) ? "" : Complaint(kSmaller, text);
}

std::string CheckUnsigned(const std::string& text) {
  if (!IsWhole(text)) return Complaint("a whole number of 0 or above", text);
  return Fits64Bits(text, false) ? "" : Complaint(kSmaller, text);
}

std::string CheckNumber(const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  bool all = !text.empty() && !absl::ascii_isspace(text[0]) && *end == '\0';
  return all && !std::isnan(value) ? "" : Complaint("a number", text);
}

std::string CheckSwitch(const std::string& text) {
  try {
    CLI::detail::to_flag_value(text);
  } catch (const std::invalid_argument&) {
    return Complaint("true or false", text);
  }
  return "";
}

std::string (*CheckOf(const CLI::Option& option))(const std::string&) {
  if (option.get_items_expected_max() == 0) return &CheckSwitch;
  const std::string type = option.get_type_name();  // "FLOAT", "INT in [1 - 64]", ...
  if (absl::StartsWith(type, "UINT")) return &CheckUnsigned;
  if (absl::StartsWith(type, "INT")) return &CheckWhole;
  return absl::StartsWith(type, "FLOAT") ? &CheckNumber : nullptr;
}

// Before ranges are looked at, which tell of a wrong kind as of a wrong size.
void CheckFirst(CLI::Option& option, std::string (*check)(const std::string&)) {
  option.transform(CLI::Validator([check](std::string& text) { return check(text); }, ""));
}

}  // namespace

void CheckFlagKinds(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (auto* check = CheckOf(*option)) CheckFirst(*option, check);
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    CheckFlagKinds(*command);
  }
}

std::string FlagError(const CLI::Error& error) {
  absl::string_view text = error.what();
  if (absl::ConsumePrefix(&text, "INI was not able to parse ")) {
    return absl::StrCat("--config: expected flags, got ", absl::StripSuffix(text, ".++"));
  }
  if (!absl::ConsumePrefix(&text, "Could not convert: ")) return std::string(text);
  // It is of its kind, as CheckFlagKinds has seen, and fits 64 bits.
  std::vector<std::string> flag = absl::StrSplit(text, absl::MaxSplits(" = ", 1));
  return absl::StrCat(flag[0], ": ", Complaint(kSmaller, flag.back()));
}

}  // namespace attnd
