// Device: the engines of one device: of attention, and, where there is one, of modules (layers).
// The registry makes them; a server has one Device for each GPU, or one for the host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace attnd {

class ModuleEngine;

// Asked before an instance of a module takes so many bytes of a device's own memory, and kept as
// long as it has them, so that nothing else that uses the device counts on them. UNAVAILABLE: not
// now. Any thread.
using HoldDeviceMemory = std::function<absl::StatusOr<std::shared_ptr<void>>(int64_t bytes)>;

struct Device {
  // Makes the engine of modules when they are to be served: it may have threads of its own. `hold`
  // may be null; an engine in the host's memory never asks it.
  using MakeModules = std::function<std::unique_ptr<ModuleEngine>(HoldDeviceMemory hold)>;

  template <class Engine>
  Device(std::unique_ptr<Engine> engine,  // NOLINT(google-explicit-constructor)
         MakeModules modules = nullptr)
      : attention(std::move(engine)), make_modules(std::move(modules)) {}

  std::unique_ptr<Backend> attention;
  MakeModules make_modules;  // null: there is none. What it makes goes before `attention`.
};

}  // namespace attnd
