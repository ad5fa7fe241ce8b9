// The cuda engine of modules on a GPU. Fails without a usable device.
#include <iostream>
#include <memory>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/device/driver_device.h"
#include "tests/conformance/module_conformance.h"
#include "tests/layers/product_conformance.h"

namespace attnd {
namespace {

std::unique_ptr<cuda::CudaBackend> MakeGpu() {
  auto device = cuda::MakeDriverDevice({.memory_fraction = 0.05});  // room for other runs
  CHECK(device.ok()) << device.status();
  const BackendInfo& info = (*device)->info();
  std::cout << "device: " << info.device << " " << info.architecture << " " << info.uuid << "\n";
  return std::make_unique<cuda::CudaBackend>(*std::move(device));
}

// Before sm_80 attention has kernels for float16 alone.
std::vector<ConformanceDevice> DevicesHere() {
  std::vector<ConformanceDevice> devices = {{"float16", MakeGpu, ElementType::kFloat16, 83, 100}};
  if (MakeGpu()->info().architecture.rfind("sm_7", 0) == 0) return devices;
  devices.push_back({"bfloat16", MakeGpu, ElementType::kBFloat16, 83, 100});
  devices.push_back({"float32", MakeGpu, ElementType::kFloat32, 83, 100});
  return devices;
}

INSTANTIATE_TEST_SUITE_P(Gpu, ModuleConformance, testing::ValuesIn(DevicesHere()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Gpu, FloatProductConformance,
                         testing::Values(ConformanceDevice{"float32", MakeGpu,
                                                           ElementType::kFloat32}),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Gpu, ProductConformance, testing::ValuesIn(DevicesHere()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace attnd
