// attnctl completion bash: a completion script, made from the commands and flags themselves.
#pragma once

#include <string>

#include "client/cli/session.h"

namespace attnd {

std::string BashCompletion(const CLI::App& app);

void AddCompletionCommand(CLI::App& app);

}  // namespace attnd
