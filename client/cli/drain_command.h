// attnctl drain: tells the daemon behind a unix socket of this host to drain, as a service manager
// does, and waits until it has ended.
#pragma once

#include "client/cli/session.h"

namespace attnd {

void AddDrainCommand(CLI::App& app, Session& session);

}  // namespace attnd
