#include "client/cli/completion_command.h"

#include <functional>
#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace attnd {
namespace {

// Flags whose value is a file.
constexpr char kFileFlags[] =
    "--in|--out|--tls-ca|--tls-cert|--tls-key|--token-file|--export|--png";

std::vector<const CLI::App*> CommandsOf(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// " --NAME" of each flag.
std::string FlagNames(const CLI::App& app) {
  std::string words;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) absl::StrAppend(&words, " --", name);
  }
  return words;
}

// What may stand after the words of `app`: its flags and its own commands.
std::string Words(const CLI::App& app) {
  std::string words = FlagNames(app);
  for (const CLI::App* command : CommandsOf(app)) absl::StrAppend(&words, " ", command->get_name());
  return words;
}

// "a b" of an option whose type reads "TEXT:{a,b}"; empty for any other.
std::string WordsOf(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos) return "";
  return absl::StrReplaceAll(type.substr(open + 1, close - open - 1), {{",", " "}});
}

// Calls `each` for the commands of `app`, and theirs.
void ForEachCommand(const CLI::App& app, const std::function<void(const CLI::App&)>& each) {
  for (const CLI::App* command : CommandsOf(app)) {
    each(*command);
    ForEachCommand(*command, each);
  }
}

// A line of a shell's `case` for each option that has a list of values: what BEFORE VALUES AFTER
// does, once one of its names has been typed.
std::string CasesOfValues(const CLI::App& app, const char* before, const char* after) {
  std::string lines;
  const auto add = [&](const CLI::App& one) {
    for (const CLI::Option* option : one.get_options()) {
      const std::string list = WordsOf(*option);
      if (list.empty()) continue;
      std::string names = option->get_name(/*positional=*/false, /*all_options=*/true);
      if (option->get_positional()) names = one.get_name();  // stands right after the command
      absl::StrAppend(&lines, "    ", absl::StrReplaceAll(names, {{",", "|"}}), ") ", before, list,
                      after, ";;\n");
    }
  };
  add(app);
  ForEachCommand(app, add);
  return lines;
}

// A text as one word of zsh and fish.
std::string Quoted(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "’"}, {"\n", " "}}), "'");
}

// " 'NAME:HELP'" of each flag, or command, as zsh's _describe reads it.
std::string DescribedFlags(const CLI::App& app) {
  std::string words;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      absl::StrAppend(&words, " ",
                      Quoted(absl::StrCat("--", name, ":", option->get_description())));
    }
  }
  return words;
}

std::string DescribedCommands(const CLI::App& app) {
  std::string words;
  for (const CLI::App* command : CommandsOf(app)) {
    absl::StrAppend(&words, " ",
                    Quoted(absl::StrCat(command->get_name(), ":", command->get_description())));
  }
  return words;
}

// The rest of fish's line about an option: its values, files, any other value, or none.
std::string FishArgument(const CLI::Option& option) {
  const std::string values = WordsOf(option);
  if (!values.empty()) return absl::StrCat(" -x -a ", Quoted(values));
  for (const std::string& name : option.get_lnames()) {
    if (absl::StrContains(absl::StrCat("|", kFileFlags, "|"), absl::StrCat("|--", name, "|"))) {
      return " -r -F";
    }
  }
  return option.get_items_expected_max() > 0 ? " -x" : "";
}

// The flags, values and commands that follow `app`, where `condition` holds.
void AddFishLines(const CLI::App& app, const std::string& condition, std::string& lines) {
  const std::string begin = absl::StrCat("complete -c attnctl", condition);
  for (const CLI::Option* option : app.get_options()) {
    const std::string values = WordsOf(*option);
    if (option->get_positional() && !values.empty()) {
      absl::StrAppend(&lines, begin, " -f -a ", Quoted(values), "\n");
    }
    for (const std::string& name : option->get_lnames()) {
      const std::string letters = absl::StrJoin(option->get_snames(), "");
      absl::StrAppend(&lines, begin, letters.empty() ? "" : " -s ", letters, " -l ", name,
                      FishArgument(*option), " -d ", Quoted(option->get_description()), "\n");
    }
  }
  std::string commands;
  for (const CLI::App* command : CommandsOf(app)) {
    absl::StrAppend(&commands, " ", command->get_name());
  }
  const std::string none = absl::StrCat("not __fish_seen_subcommand_from", commands);
  for (const CLI::App* command : CommandsOf(app)) {
    const std::string parent = app.get_parent() == nullptr ? "" : app.get_name();
    absl::StrAppend(&lines, "complete -c attnctl -n '", none,
                    parent.empty() ? "" : "; and __fish_seen_subcommand_from " + parent, "' -f -a ",
                    command->get_name(), " -d ", Quoted(command->get_description()), "\n");
    AddFishLines(*command,
                 absl::StrCat(" -n '__fish_seen_subcommand_from ", command->get_name(), "'"),
                 lines);
  }
}

std::string BashCompletion(const CLI::App& app) {
  std::string words;
  ForEachCommand(app, [&](const CLI::App& command) {
    absl::StrAppend(&words, "      ", command.get_name(), ") words=\"$global", Words(command),
                    "\";;\n");
  });
  return absl::StrCat(
      "# bash completion of attnctl; to use it: source <(attnctl completion bash)\n"
      "_attnctl() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" words='",
      Words(app).substr(1), "' w\n  local global='", FlagNames(app).substr(1),
      "'\n"
      "  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
      "    case \"$w\" in\n",
      words,
      "    esac\n"
      "  done\n"
      "  case \"${COMP_WORDS[COMP_CWORD-1]}\" in\n    ",
      kFileFlags, ") COMPREPLY=($(compgen -f -- \"$word\")); return;;\n",
      CasesOfValues(app, "words='", "'"),
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}\n"
      "complete -o default -F _attnctl attnctl\n");
}

std::string ZshCompletion(const CLI::App& app) {
  std::string words;
  ForEachCommand(app, [&](const CLI::App& command) {
    absl::StrAppend(&words, "      ", command.get_name(), ") offered=($global",
                    DescribedFlags(command), DescribedCommands(command), ");;\n");
  });
  return absl::StrCat(
      "#compdef attnctl\n"
      "# zsh completion of attnctl; to use it: source <(attnctl completion zsh), or as a file\n"
      "# _attnctl in a folder of fpath\n"
      "_attnctl() {\n"
      "  local w\n"
      "  local -a global offered\n"
      "  global=(",
      DescribedFlags(app), ")\n  offered=($global", DescribedCommands(app),
      ")\n"
      "  for w in ${words[2,CURRENT-1]}; do\n"
      "    case $w in\n",
      words,
      "    esac\n"
      "  done\n"
      "  case ${words[CURRENT-1]} in\n    ",
      kFileFlags, ") _files; return;;\n", CasesOfValues(app, "compadd ", "; return"),
      "  esac\n"
      "  _describe attnctl offered\n"
      "}\n"
      "if [[ $funcstack[1] == _attnctl ]]; then _attnctl \"$@\"; else compdef _attnctl attnctl; "
      "fi\n");
}

std::string FishCompletion(const CLI::App& app) {
  std::string lines = "# fish completion of attnctl; to use it: attnctl completion fish | source\n";
  AddFishLines(app, "", lines);
  return lines;
}

}  // namespace

void AddCompletionCommand(CLI::App& app) {
  auto shell = std::make_shared<std::string>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand("completion", "Print a shell completion script");
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "Examples:\n"
      "  source <(attnctl completion bash)\n"
      "  source <(attnctl completion zsh)\n"
      "  attnctl completion fish | source");
  command->callback([&app, shell] {
    std::cout << (*shell == "bash"  ? BashCompletion(app)
                  : *shell == "zsh" ? ZshCompletion(app)
                                    : FishCompletion(app));
  });
}

}  // namespace attnd
