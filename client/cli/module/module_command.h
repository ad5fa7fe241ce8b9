// attnctl module: the caller's modules on a daemon, and what one would take.
#pragma once

#include "CLI/App.hpp"
#include "client/cli/session.h"

namespace attnd {

void AddModuleCommand(CLI::App& app, Session& session);

}  // namespace attnd
