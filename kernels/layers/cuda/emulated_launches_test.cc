// How often a call of a module waits for its GPU: a launch of the device is one wait.
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "modules/known_layers.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/layers/engine_fixture.h"

namespace attnd {
namespace {

// Another device that counts launches.
class CountedDevice final : public cuda::KernelDevice {
 public:
  CountedDevice(std::unique_ptr<cuda::KernelDevice> device, int& launches)
      : device_(std::move(device)), launches_(launches) {}

  const BackendInfo& info() const override { return device_->info(); }
  int multiprocessors() const override { return device_->multiprocessors(); }
  const std::vector<KernelRow>& rows() const override { return device_->rows(); }
  absl::StatusOr<TensorMap> Encode(const RowsBox& box) const override {
    return device_->Encode(box);
  }
  absl::Status Check(const KernelRow& row) const override { return device_->Check(row); }
  absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> Begin(
      int64_t bytes, absl::Span<const cuda::Region> regions) override {
    ++launches_;
    return device_->Begin(bytes, regions);
  }
  absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> BeginIn(
      const cuda::DevicePart& arena, absl::Span<const cuda::Region> regions) override {
    ++launches_;
    return device_->BeginIn(arena, regions);
  }
  std::unique_ptr<cuda::DeviceMemory> Hold(int64_t bytes) override { return device_->Hold(bytes); }
  int64_t mask_bytes() const override { return device_->mask_bytes(); }
  double max_slice_seconds() const override { return device_->max_slice_seconds(); }

 private:
  const std::unique_ptr<cuda::KernelDevice> device_;
  int& launches_;
};

std::shared_ptr<const ModuleDescription> TwoLayers() {
  const LayerSizes sizes{.layers = 2, .element = ElementType::kFloat16};
  OptimizerSpec adamw{.kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  return std::make_shared<ModuleDescription>(Value(ModuleGraph::Make(BertLayers(sizes))),
                                             std::move(adamw));
}

TEST(ModuleLaunches, AreOneACallWhateverLayersItHas) {
  int launches = 0;
  cuda::CudaBackend backend(std::make_unique<CountedDevice>(
      cuda::MakeEmulatedDevice({.architecture = Architecture::kSm80}), launches));
  const std::unique_ptr<ModuleEngine> engine = MakeCudaModuleEngine(backend);
  const auto module = TwoLayers();
  const CallRows rows{.batch = 2, .length = 5};
  const ModuleLimits limits{.max_rows = rows.rows(), .kept_rows = rows.rows()};
  const EnginePlan plan = Value(engine->Plan(*module, limits, int64_t{1} << 30));
  const std::unique_ptr<ModuleInstance> instance = Value(engine->Make(module, limits, plan));
  Bytes x(static_cast<size_t>(rows.rows() * module->graph.layout().width * 2)), y = x;
  const auto launches_of = [&launches](const auto& call) {
    launches = 0;
    call();
    return launches;
  };
  ActivationId kept = 0;
  EXPECT_EQ(launches_of([&] {
              kept = Value(
                  instance->Forward({.rows = &rows, .x = x, .keep = true, .y = absl::MakeSpan(y)}));
            }),
            1);
  EXPECT_EQ(launches_of([&] {
              CheckOk(instance->Backward({.activation = kept, .dy = x, .dx = absl::MakeSpan(y)}));
            }),
            1);
  // The norm of the gradients, then what follows from it.
  const GroupRates rates[] = {{.learning_rate = 1e-3}};
  EXPECT_EQ(launches_of([&] { Value(instance->Step({.groups = rates})); }), 2);
}

}  // namespace
}  // namespace attnd
