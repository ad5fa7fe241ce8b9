// attnctl: the command line of attnd. Each command has its own file.

#include <algorithm>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/flag_words.h"
#include "base/standard_streams.h"
#include "base/version.h"
#include "client/cli/bench/bench_command.h"
#include "client/cli/bench/estimate_command.h"
#include "client/cli/check_command.h"
#include "client/cli/completion_command.h"
#include "client/cli/drain_command.h"
#include "client/cli/info_command.h"
#include "client/cli/mask/mask_command.h"
#include "client/cli/module/module_command.h"
#include "client/cli/run_command.h"
#include "client/cli/session.h"
#include "client/cli/top_command.h"
#include "net/process_tuning.h"

namespace attnd {
namespace {

// Letters to change, add or leave out to make one word of the other.
size_t Distance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// attnctl and the commands that were chosen, such as module and list.
std::vector<const CLI::App*> Chosen(const CLI::App& app) {
  std::vector<const CLI::App*> chosen = {&app};
  while (!chosen.back()->get_subcommands().empty()) {
    chosen.push_back(chosen.back()->get_subcommands().front());
  }
  return chosen;
}

// "; did you mean WORD?" of the nearest command of the last one chosen, or flag of any of them, if
// one is near.
std::string Suggestion(const std::vector<const CLI::App*>& chosen, absl::string_view typed) {
  std::vector<std::string> words;
  for (const CLI::App* command : chosen.back()->get_subcommands(nullptr)) {
    words.push_back(command->get_name());
  }
  for (const CLI::App* one : chosen) {
    for (const CLI::Option* option : one->get_options()) {
      for (const std::string& name : option->get_lnames()) words.push_back("--" + name);
    }
  }
  const auto nearest = std::min_element(words.begin(), words.end(), [typed](auto& a, auto& b) {
    return Distance(typed, a) < Distance(typed, b);
  });
  return Distance(typed, *nearest) > 2 ? "" : absl::StrCat("; did you mean ", *nearest, "?");
}

// Wrong usage has been found, or --help or --version was asked for.
int ExitOf(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);
  const std::vector<const CLI::App*> chosen = Chosen(app);
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  const std::string suggestion = rest.empty() ? "" : Suggestion(chosen, rest.front());
  const bool has_commands = !chosen.back()->get_subcommands(nullptr).empty();
  if (has_commands && !rest.empty() && rest.front()[0] != '-') {
    std::cerr << "attnctl: there is no command " << rest.front() << suggestion << "; attnctl "
              << (chosen.size() == 1 ? "" : chosen.back()->get_name() + " ")
              << "--help lists them\n";
  } else {
    std::cerr << "attnctl: " << error.what() << suggestion
              << "\nRun with --help for more information.\n";
  }
  return kExitUsage;
}

// Checks that the output has arrived, on a full disk too.
int AfterOutput(int exit_code) {
  if (std::cout.flush()) return exit_code;
  std::cerr << "attnctl: cannot write to standard output\n";
  return exit_code == 0 ? kExitFailed : exit_code;
}

int Main(int argc, char** argv) {
  OccupyStandardStreams();
  TuneForTransport();
  CLI::App app("attnctl: look at, check, measure and use an attnd daemon", "attnctl");
  app.set_version_flag("--version", absl::StrCat("attnctl ", VersionString()));
  app.require_subcommand(1);
  app.fallthrough();  // global flags may stand after the command too
  app.footer(
      "Exit codes: 0 done; 1 the answer is no (check found a deviation, the daemon is not "
      "serving);\n"
      "2 wrong usage; 3 the daemon cannot be reached or did not answer in time; 4 a call or a "
      "file\n"
      "failed.\n\n"
      "Examples:\n"
      "  attnctl info\n"
      "  attnctl --address unix:/run/attnd/attnd.sock check\n"
      "  attnctl bench --shape 2,8,2048,64 --causal --direction both --duration 5\n"
      "  attnctl mask 'longformer(64,64)' --shape 1,8,4096,64\n"
      "  attnctl run --in tensors.safetensors --out result.safetensors --causal bottom_right\n"
      "  attnctl top --metrics http://127.0.0.1:9464/metrics");
  Session session(app);
  AddInfoCommand(app, session);
  AddHealthCommand(app, session);
  AddDrainCommand(app, session);
  AddCheckCommand(app, session);
  AddBenchCommand(app, session);
  AddEstimateCommand(app, session);
  AddMaskCommand(app, session);
  AddModuleCommand(app, session);
  AddRunCommand(app, session);
  AddTopCommand(app, session);
  AddCompletionCommand(app);
  try {  // CLI11 tells of wrong usage, --help and --version by exceptions
    app.parse(FlagWords(argc, argv));
  } catch (const CLI::ParseError& error) {
    return AfterOutput(ExitOf(app, error));
  }
  return AfterOutput(session.exit_code());
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
