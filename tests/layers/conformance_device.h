// A GPU, real or emulated, that tests of modules run on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "attention/element.h"
#include "kernels/cuda/cuda_backend.h"

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

}  // namespace attnd
