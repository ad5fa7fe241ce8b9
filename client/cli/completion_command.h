// attnctl completion: a completion script of bash, made from the commands and flags themselves.
#pragma once

#include "CLI/App.hpp"

namespace attnd {

void AddCompletionCommand(CLI::App& app);

}  // namespace attnd
