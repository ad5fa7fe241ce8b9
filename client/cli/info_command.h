// attnctl info and attnctl health.
#pragma once

#include "client/cli/session.h"

namespace attnd {

void AddInfoCommand(CLI::App& app, Session& session);
void AddHealthCommand(CLI::App& app, Session& session);

}  // namespace attnd
