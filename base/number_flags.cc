#include "base/number_flags.h"

#include <cmath>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string Complaint(const std::string& text) {
  double value = 0;
  bool is_nan = absl::SimpleAtod(text, &value) && std::isnan(value);
  return text.empty() || is_nan ? absl::StrCat("expected a number, got \"", text, "\"") : "";
}

}  // namespace

void RefuseEmptyNumbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();  // "FLOAT", "INT in [1 - 64]", ...
    for (const char* number : {"INT", "UINT", "FLOAT"}) {
      if (absl::StartsWith(type, number)) option->check(&Complaint);
    }
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    RefuseEmptyNumbers(*command);
  }
}

}  // namespace attnd
