// DaemonMain: what attnd does from its flags to its exit code (docs/FLAGS.md), over engines that
// its main makes: the product's by kernels/registry/registry.h, a benchmark's or a fault test's
// their own. Once, on the main thread, before any other starts.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/app/options.h"

namespace attnd {

// At least one device. `note` receives a line for the log, or nothing.
using DeviceFactory = std::function<absl::StatusOr<std::vector<Device>>(
    const ServerOptions& options, std::string* note)>;

int DaemonMain(int argc, char** argv, const DeviceFactory& make_devices);

}  // namespace attnd
