// attnctl run: attention on the tensors of a safetensors file.
#pragma once

#include "client/cli/session.h"

namespace attnd {

void AddRunCommand(CLI::App& app, Session& session);

}  // namespace attnd
