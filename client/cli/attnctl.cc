// attnctl: the command line of attnd. Each command has its own file.

#include <iostream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/flag_words.h"
#include "base/standard_streams.h"
#include "base/version.h"
#include "client/cli/bench_command.h"
#include "client/cli/check_command.h"
#include "client/cli/completion_command.h"
#include "client/cli/info_command.h"
#include "client/cli/mask/mask_command.h"
#include "client/cli/module/module_command.h"
#include "client/cli/run_command.h"
#include "client/cli/session.h"
#include "client/cli/top_command.h"
#include "net/process_tuning.h"

namespace attnd {
namespace {

// Wrong usage has been found, or --help or --version was asked for.
int ExitOf(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);
  std::vector<std::string> rest = app.remaining();
  bool unknown = app.get_subcommands().empty() && !rest.empty() && rest.front()[0] != '-';
  if (unknown) {
    std::cerr << "attnctl: there is no command " << rest.front() << "; attnctl --help lists them\n";
  } else {
    std::cerr << "attnctl: " << error.what() << "\nRun with --help for more information.\n";
  }
  return kExitUsage;
}

// What was printed has to have arrived, on a full disk too.
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
  AddCheckCommand(app, session);
  AddBenchCommand(app, session);
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
