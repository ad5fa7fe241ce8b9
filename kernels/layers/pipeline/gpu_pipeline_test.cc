// Modules cut into ranges of layers on all GPUs; where there are fewer than three, ranges share
// one. Fails without a usable device.
#include <iostream>
#include <memory>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/device/driver_device.h"
#include "tests/layers/pipeline_conformance.h"

namespace attnd {
namespace {

std::unique_ptr<cuda::CudaBackend> MakeGpu(int number) {
  const auto count = cuda::CountDevices();
  CHECK(count.ok()) << count.status();
  auto device = cuda::MakeDriverDevice(
      {.ordinal = number % *count, .memory_fraction = 0.05});  // room for other runs
  CHECK(device.ok()) << device.status();
  const BackendInfo& info = (*device)->info();
  std::cout << "device " << info.ordinal << ": " << info.device << " " << info.uuid << "\n";
  return std::make_unique<cuda::CudaBackend>(*std::move(device));
}

// Before sm_80 attention has kernels for float16 alone.
std::vector<PipelineGpus> GpusHere() {
  std::vector<PipelineGpus> gpus = {{"float16", MakeGpu, ElementType::kFloat16, 64, 83}};
  if (MakeGpu(0)->info().architecture.rfind("sm_7", 0) == 0) return gpus;
  gpus.push_back({"bfloat16", MakeGpu, ElementType::kBFloat16, 64, 83});
  gpus.push_back({"float32", MakeGpu, ElementType::kFloat32, 64, 83});
  return gpus;
}

INSTANTIATE_TEST_SUITE_P(Gpu, PipelineConformance, testing::ValuesIn(GpusHere()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace attnd
