// attnctl bench wire: what the wire between here and a daemon gives.
#pragma once

#include "client/cli/session.h"

namespace attnd {

// As a sub-command of `bench`.
void AddWireCommand(CLI::App& bench, Session& session);

}  // namespace attnd
