// attnctl top: a live view of a daemon from its metrics.
#pragma once

#include "client/cli/session.h"

namespace attnd {

void AddTopCommand(CLI::App& app, Session& session);

}  // namespace attnd
