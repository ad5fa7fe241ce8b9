// One of a PipelineEngine's devices.
#pragma once

#include <memory>
#include <string>

#include "modules/module_engine.h"

namespace attnd {

struct PipelineDevice {
  std::string name;          // in messages
  std::string architecture;  // devices of one give the same bits
  std::unique_ptr<ModuleEngine> engine;
};

}  // namespace attnd
