// attnctl check: random problems over the whole option set, forward and backward, compared element
// by element with exact attention (float64, here) within the bounds of docs/NUMERICS.md.
#pragma once

#include "client/cli/session.h"

namespace attnd {

void AddCheckCommand(CLI::App& app, Session& session);

}  // namespace attnd
