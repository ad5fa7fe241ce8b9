// The cuda engine of modules against the float64 reference and the other engines, on any device.
// Tests instantiate ModuleConformance with the device that they have.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "tests/layers/conformance_device.h"
#include "modules/module_engine.h"

namespace attnd {

class ModuleConformance : public testing::TestWithParam<ConformanceDevice> {
 protected:
  ModuleConformance();
  ~ModuleConformance() override;

  const ElementType element_;
  const std::unique_ptr<cuda::CudaBackend> attention_;
  const std::unique_ptr<ModuleEngine> engine_;
};

}  // namespace attnd
