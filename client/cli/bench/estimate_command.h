// attnctl estimate: the time of a training step's attention behind a link, by arithmetic from
// given rates, or from those that a live daemon and its link reach.
#pragma once

#include "CLI/App.hpp"
#include "client/cli/session.h"

namespace attnd {

void AddEstimateCommand(CLI::App& app, Session& session);

}  // namespace attnd
