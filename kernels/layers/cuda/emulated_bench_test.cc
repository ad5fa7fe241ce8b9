// An instance of a module as a search measures on it.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "kernels/layers/cuda/device_bench.h"
#include "modules/known_layers.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/layers/engine_fixture.h"

namespace attnd {
namespace {

constexpr LayerSizes kSizes{.width = 48,
                            .heads = 4,
                            .kv_heads = 4,
                            .inner = 136,
                            .layers = 2,
                            .element = ElementType::kFloat16};

class BenchedModule {
 public:
  explicit BenchedModule(Architecture architecture)
      : backend_(cuda::MakeEmulatedDevice({.architecture = architecture})) {
    OptimizerSpec adamw{
        .kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    module_ = std::make_shared<ModuleDescription>(Value(ModuleGraph::Make(BertLayers(kSizes))),
                                                  std::move(adamw));
    const ModuleLimits limits{.max_rows = 10, .kept_rows = 30};
    auto device = std::make_unique<CudaDevice>(backend_);
    CudaDevice& gpu = *device;
    const EnginePlan plan = Value(ExecutorInstance::Plan(*module_, limits, 1 << 30, *device));
    instance_ = Value(ExecutorInstance::Make(module_, limits, plan, std::move(device)));
    bench_ = Value(DeviceBench::Make(*instance_, gpu, nullptr));
  }
  SegmentPart All(Direction direction) const {
    const ModuleGraph& graph = module_->graph;
    const BlockScheme scheme = Value(SchemeOf(graph, 0, SingleOps(graph, 0)));
    return {0, direction, direction == Direction::kForward ? scheme.forward : scheme.backward};
  }
  DeviceBench& bench() { return *bench_; }
  // Numbers that are not 0, of all tensors.
  int64_t Touched() const {
    int64_t touched = 0;
    for (size_t n = 0; n < module_->table.entries().size(); ++n) {
      for (TensorRole role : {TensorRole::kWeight, TensorRole::kGradient, TensorRole::kMoment1}) {
        Bytes bytes(module_->table.entries()[n].elements * 4);
        CheckOk(instance_->Get(static_cast<int64_t>(n), role, ElementType::kFloat32,
                               absl::MakeSpan(bytes)));
        const Numbers numbers = NumbersOf(bytes, ElementType::kFloat32);
        touched += std::count_if(numbers.begin(), numbers.end(), [](double x) { return x != 0; });
      }
    }
    return touched;
  }

 private:
  cuda::CudaBackend backend_;
  std::shared_ptr<const ModuleDescription> module_;
  std::unique_ptr<ExecutorInstance> instance_;
  std::unique_ptr<DeviceBench> bench_;
};

constexpr ProductKey kOfWidth = {KernelKind::kProductRowsRows, 48, 48};

TEST(DeviceBench, TellsWhatProductsCouldTake) {
  BenchedModule hopper(Architecture::kSm90);
  // q, k and v; attention comes before the next one.
  const ProductLog forward = Value(hopper.bench().ProductsOf(hopper.All(Direction::kForward)));
  ASSERT_EQ(forward.groups.size(), 4u);
  EXPECT_EQ(forward.groups[0].keys, (std::vector<ProductKey>{kOfWidth, kOfWidth, kOfWidth}));
  EXPECT_EQ(forward.groups[1].keys, std::vector<ProductKey>{kOfWidth});
  EXPECT_EQ(forward.groups[1].gradient_columns, 0);
  EXPECT_TRUE(forward.sized.empty());
  const ProductLog backward = Value(hopper.bench().ProductsOf(hopper.All(Direction::kBackward)));
  const auto gradients =
      std::find_if(backward.groups.begin(), backward.groups.end(),
                   [](const auto& group) { return group.gradient_columns != 0; });
  ASSERT_NE(gradients, backward.groups.end());
  EXPECT_EQ(gradients->keys.size(), 6u);
  EXPECT_EQ(gradients->gradient_columns, kNarrowGradientColumns);

  BenchedModule ampere(Architecture::kSm80);
  const ProductLog sized = Value(ampere.bench().ProductsOf(ampere.All(Direction::kForward)));
  EXPECT_TRUE(sized.groups.empty());
  EXPECT_EQ(sized.sized.size(), 3u);
  EXPECT_EQ(sized.sized.count(kOfWidth), 1u);
}

TEST(DeviceBench, LeavesMemoryAsItWasMade) {
  BenchedModule module(Architecture::kSm80);
  EXPECT_GT(module.Touched(), 48 * 48);  // weights
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    EXPECT_GT(Value(module.bench().Seconds(module.All(direction), {}, 2)), 0);
  }
  CheckOk(module.bench().Finish());
  EXPECT_EQ(module.Touched(), 0);
}

}  // namespace
}  // namespace attnd
