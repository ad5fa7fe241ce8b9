#include "client/cli/completion_command.h"

#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace attnd {
namespace {

std::vector<const CLI::App*> CommandsOf(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// What may stand after the words of `app`: its flags and its own commands.
std::string Words(const CLI::App& app) {
  std::string words;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) absl::StrAppend(&words, " --", name);
  }
  for (const CLI::App* command : CommandsOf(app)) absl::StrAppend(&words, " ", command->get_name());
  return words;
}

// "a b" of an option whose type reads "TEXT:{a,b}"; empty for any other.
std::string ValuesOf(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos) return "";
  return absl::StrReplaceAll(type.substr(open + 1, close - open - 1), {{",", " "}});
}

// Adds a line of bash's `case` for each option of `app` and its commands that has a list of values,
// and one for the words that follow each command.
void AddCases(const CLI::App& app, std::string& values, std::string& words) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string list = ValuesOf(*option);
    if (list.empty()) continue;
    std::string names = option->get_name(/*positional=*/false, /*all_options=*/true);
    if (option->get_positional()) names = app.get_name();  // stands right after the command
    absl::StrAppend(&values, "    ", absl::StrReplaceAll(names, {{",", "|"}}), ") words='", list,
                    "';;\n");
  }
  for (const CLI::App* command : CommandsOf(app)) {
    absl::StrAppend(&words, "    ", command->get_name(), ") words=\"$global", Words(*command),
                    "\";;\n");
    AddCases(*command, values, words);
  }
}

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  std::string values, words, flags;
  AddCases(app, values, words);
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) absl::StrAppend(&flags, " --", name);
  }
  return absl::StrCat(
      "# bash completion of attnctl; to use it: source <(attnctl completion bash)\n"
      "_attnctl() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" words='",
      Words(app).substr(1), "' w\n  local global='", flags.substr(1),
      "'\n"
      "  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
      "    case \"$w\" in\n",
      absl::StrReplaceAll(words, {{"    ", "      "}}),
      "    esac\n"
      "  done\n"
      "  case \"${COMP_WORDS[COMP_CWORD-1]}\" in\n"
      "    --in|--out|--tls-ca|--tls-cert|--tls-key|--token-file|--export|--png)\n"
      "      COMPREPLY=($(compgen -f -- \"$word\")); return;;\n",
      values,
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}\n"
      "complete -o default -F _attnctl attnctl\n");
}

void AddCompletionCommand(CLI::App& app) {
  auto shell = std::make_shared<std::string>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand("completion", "Print a shell completion script");
  command->add_option("shell", *shell, "bash")->required()->check(CLI::IsMember({"bash"}));
  command->footer("Example:\n  source <(attnctl completion bash)");
  command->callback([&app, shell] { std::cout << BashCompletion(app); });
}

}  // namespace attnd
