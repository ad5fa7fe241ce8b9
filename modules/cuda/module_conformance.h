// The cuda engine of modules against the float64 reference and the other engines, on any device.
// Tests instantiate ModuleConformance with the device that they have.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "attention/element.h"
#include "kernels/engine/cuda_backend.h"
#include "modules/module_engine.h"

namespace attnd {

struct ConformanceDevice {
  std::string name;
  std::function<std::unique_ptr<cuda::CudaBackend>()> make;
  ElementType element = ElementType::kFloat16;
  int64_t length = 0;      // of a sequence of the known layers
  int random_modules = 0;  // small ones
};
inline std::ostream& operator<<(std::ostream& out, const ConformanceDevice& device) {
  return out << device.name;
}

class ModuleConformance : public testing::TestWithParam<ConformanceDevice> {
 protected:
  ModuleConformance();
  ~ModuleConformance() override;

  const ElementType element_;
  const std::unique_ptr<cuda::CudaBackend> attention_;
  const std::unique_ptr<ModuleEngine> engine_;
};

}  // namespace attnd
