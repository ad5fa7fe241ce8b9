#include "client/cli/completion_command.h"

#include <iostream>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace attnd {
namespace {

// Flags whose value is a file.
constexpr char kFileFlags[] =
    "--in|--out|--tls-ca|--tls-cert|--tls-key|--token-file|--export|--png";

// The lines of the script's two `case` statements: what each command offers after itself, and the
// values of each option that has a list of them.
struct CompletionCases {
  std::string words, values;
};

std::string FlagNames(const CLI::App& app) {
  std::string words;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) absl::StrAppend(&words, " --", name);
  }
  return words;
}

// The type of an option with a list of values reads "TEXT:{a,b}".
void AddValues(const CLI::App& app, const CLI::Option& option, std::string& lines) {
  const std::string type = option.get_type_name();
  const size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos) return;
  std::string names = option.get_name(/*positional=*/false, /*all_options=*/true);
  if (option.get_positional()) names = app.get_name();  // stands right after the command
  const std::string values = type.substr(open + 1, close - open - 1);
  absl::StrAppend(&lines, "    ", absl::StrReplaceAll(names, {{",", "|"}}), ") words='",
                  absl::StrReplaceAll(values, {{",", " "}}), "';;\n");
}

// Adds the lines of `app`'s commands, and theirs. Returns the words that may follow `app`.
std::string AddCases(const CLI::App& app, CompletionCases& cases) {
  for (const CLI::Option* option : app.get_options()) AddValues(app, *option, cases.values);
  std::string words = FlagNames(app);
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    absl::StrAppend(&words, " ", command->get_name());
    CompletionCases inner;
    const std::string follow = AddCases(*command, inner);
    absl::StrAppend(&cases.words, "      ", command->get_name(), ") words=\"$global", follow,
                    "\";;\n", inner.words);
    cases.values += inner.values;
  }
  return words;
}

std::string BashCompletion(const CLI::App& app) {
  CompletionCases cases;
  const std::string words = AddCases(app, cases);
  return absl::StrCat(
      "# bash completion of attnctl; to use it: source <(attnctl completion bash)\n"
      "_attnctl() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" words='",
      words.substr(1), "' w\n  local global='", FlagNames(app).substr(1),
      "'\n"
      "  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
      "    case \"$w\" in\n",
      cases.words,
      "    esac\n"
      "  done\n"
      "  case \"${COMP_WORDS[COMP_CWORD-1]}\" in\n    ",
      kFileFlags, ") COMPREPLY=($(compgen -f -- \"$word\")); return;;\n", cases.values,
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}\n"
      "complete -o default -F _attnctl attnctl\n");
}

}  // namespace

void AddCompletionCommand(CLI::App& app) {
  auto shell = std::make_shared<std::string>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand("completion", "Print a shell completion script");
  command->add_option("shell", *shell, "bash")->required()->check(CLI::IsMember({"bash"}));
  command->footer("Example:\n  source <(attnctl completion bash)");
  command->callback([&app, shell] { std::cout << BashCompletion(app); });
}

}  // namespace attnd
