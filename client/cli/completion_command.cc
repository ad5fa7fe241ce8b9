#include "client/cli/completion_command.h"

#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string LongFlags(const CLI::App& app) {
  std::string flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) absl::StrAppend(&flags, " --", name);
  }
  return flags;
}

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  std::string commands, cases;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    absl::StrAppend(&commands, " ", command->get_name());
    absl::StrAppend(&cases, "      ", command->get_name(), ") flags=\"$global", LongFlags(*command),
                    "\";;\n");
  }
  return absl::StrCat(
      "# bash completion of attnctl; to use it: source <(attnctl completion bash)\n"
      "_attnctl() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" command=\"\" flags w\n"
      "  local commands=\"",
      commands.substr(1),
      "\"\n"
      "  local global=\"",
      LongFlags(app).substr(1),
      "\"\n"
      "  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
      "    [[ \" $commands \" == *\" $w \"* ]] && command=\"$w\"\n"
      "  done\n"
      "  case \"${COMP_WORDS[COMP_CWORD-1]}\" in\n"
      "    -o|--output) COMPREPLY=($(compgen -W 'table json' -- \"$word\")); return;;\n"
      "    --in|--out|--tls-*|--token-file|--export) COMPREPLY=($(compgen -f -- \"$word\")); "
      "return;;\n"
      "  esac\n"
      "  case \"$command\" in\n",
      cases,
      "      *) flags=\"$global $commands\";;\n"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$flags\" -- \"$word\"))\n"
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
