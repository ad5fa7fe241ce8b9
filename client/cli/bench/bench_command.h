// attnctl bench: latency and throughput of one problem at one or several loads.
#pragma once

#include "client/cli/session.h"

namespace attnd {

void AddBenchCommand(CLI::App& app, Session& session);

}  // namespace attnd
