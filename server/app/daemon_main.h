// DaemonMain: what attnd does from its flags to its exit code (docs/FLAGS.md), over engines that
// its main makes: the product's by kernels/registry/registry.h, a benchmark's or a fault test's their own.
// Once, on the main thread, before any other starts.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/app/options.h"

namespace attnd {

// At least one engine. `note` receives a line for the log, or nothing.
using EngineFactory = std::function<absl::StatusOr<std::vector<std::unique_ptr<Backend>>>(
    const ServerOptions& options, std::string* note)>;

int DaemonMain(int argc, char** argv, const EngineFactory& make_engines);

}  // namespace attnd
