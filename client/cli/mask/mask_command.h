// attnctl mask: what a mask by description shows and costs, and a picture of it.
#pragma once

#include "CLI/App.hpp"
#include "client/cli/session.h"

namespace attnd {

void AddMaskCommand(CLI::App& app, Session& session);

}  // namespace attnd
