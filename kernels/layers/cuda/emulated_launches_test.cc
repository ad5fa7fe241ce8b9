// How often a call of a module waits for its GPU: a launch of the device is one wait. And how many
// kernels it runs.
#include <functional>
#include <map>
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

struct Counts {
  int launches = 0, small_products = 0;
  std::map<KernelKind, int> kernels;
};

class CountedLaunch final : public cuda::DeviceLaunch {
 public:
  CountedLaunch(std::unique_ptr<cuda::DeviceLaunch> launch, Counts& counts)
      : launch_(std::move(launch)), counts_(counts) {}
  uint64_t arena() const override { return launch_->arena(); }
  void Use(const cuda::DeviceMemory& memory, absl::Span<const cuda::Region> regions) override {
    launch_->Use(memory, regions);
  }
  absl::Status Upload(const cuda::HostCopy& copy) override { return launch_->Upload(copy); }
  absl::Status UploadCopy(uint64_t to, const void* from, int64_t bytes) override {
    return launch_->UploadCopy(to, from, bytes);
  }
  absl::Status SetZero(uint64_t at, int64_t bytes) override { return launch_->SetZero(at, bytes); }
  absl::StatusOr<bool> Run(absl::Span<const cuda::KernelStep> steps,
                           const std::function<bool()>& wanted) override {
    for (const cuda::KernelStep& step : steps) {
      ++counts_.kernels[step.row.kind];
      if (step.row.kind >= KernelKind::kProductRowsRows && step.row.small) ++counts_.small_products;
    }
    return launch_->Run(steps, wanted);
  }
  absl::Status Download(const cuda::HostCopy& copy) override { return launch_->Download(copy); }
  absl::StatusOr<cuda::DeviceTimes> Finish() override { return launch_->Finish(); }

 private:
  const std::unique_ptr<cuda::DeviceLaunch> launch_;
  Counts& counts_;
};

// Another device that counts launches and their kernels.
class CountedDevice final : public cuda::KernelDevice {
 public:
  CountedDevice(std::unique_ptr<cuda::KernelDevice> device, Counts& counts)
      : device_(std::move(device)), counts_(counts) {}

  const BackendInfo& info() const override { return device_->info(); }
  int multiprocessors() const override { return device_->multiprocessors(); }
  const std::vector<KernelRow>& rows() const override { return device_->rows(); }
  absl::StatusOr<TensorMap> Encode(const RowsBox& box) const override {
    return device_->Encode(box);
  }
  absl::Status Check(const KernelRow& row) const override { return device_->Check(row); }
  absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> Begin(
      int64_t bytes, absl::Span<const cuda::Region> regions) override {
    return Counted(device_->Begin(bytes, regions));
  }
  absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> BeginIn(
      const cuda::DevicePart& arena, absl::Span<const cuda::Region> regions) override {
    return Counted(device_->BeginIn(arena, regions));
  }
  std::unique_ptr<cuda::DeviceMemory> Hold(int64_t bytes) override { return device_->Hold(bytes); }
  absl::StatusOr<std::unique_ptr<cuda::DeviceStream>> MakeStream() override {
    return device_->MakeStream();
  }
  int64_t mask_bytes() const override { return device_->mask_bytes(); }
  double max_slice_seconds() const override { return device_->max_slice_seconds(); }

 private:
  absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> Counted(
      absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> launch) {
    ++counts_.launches;
    if (!launch.ok()) return launch;
    return std::make_unique<CountedLaunch>(*std::move(launch), counts_);
  }

  const std::unique_ptr<cuda::KernelDevice> device_;
  Counts& counts_;
};

// A module, and calls of it that say what they took.
class CountedModule {
 public:
  // `plan`: of what a search has found.
  CountedModule(ModuleLayout layout, Fusion fusion, Architecture architecture = Architecture::kSm80,
                const BlockChoice* plan = nullptr)
      : CountedModule(std::move(layout), fusion, architecture, plan, {.batch = 2, .length = 5}) {}
  // Calls have these rows, and are cut into parts of so many bytes; 0: they are not.
  CountedModule(ModuleLayout layout, Fusion fusion, Architecture architecture,
                const BlockChoice* plan, CallRows rows, int64_t part_bytes = 0)
      : rows_(std::move(rows)),
        backend_(std::make_unique<CountedDevice>(
            cuda::MakeEmulatedDevice({.architecture = architecture}), counts_)) {
    OptimizerSpec adamw{
        .kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    module_ = std::make_shared<ModuleDescription>(Value(ModuleGraph::Make(std::move(layout))),
                                                  std::move(adamw));
    const ModuleLimits limits{.max_rows = rows_.rows(), .kept_rows = rows_.rows()};
    CudaModuleOptions options = {.cut = CutsOnGpu(fusion, backend_.info()),
                                 .part_bytes = part_bytes};
    if (plan != nullptr) {
      const auto cache = std::make_shared<PlanCache>(testing::TempDir() + "/counted_plans");
      options.search = std::make_shared<PlanSearch>("emulated", *GpuNamed("h100"), cache);
      CheckOk(cache->Put(options.search->KeyOf(module_->graph, 0, limits), *plan));
    }
    engine_ = MakeCudaModuleEngine(backend_, std::move(options));
    instance_ =
        Value(engine_->Make(module_, limits, Value(engine_->Plan(*module_, limits, 1 << 30))));
    x_.resize(static_cast<size_t>(rows_.rows() * module_->graph.layout().width * 2));
    y_ = x_;
  }
  Counts Forward() {
    return CountsOf([&] {
      kept_ = Value(
          instance_->Forward({.rows = &rows_, .x = x_, .keep = true, .y = absl::MakeSpan(y_)}));
    });
  }
  Counts Backward() {
    return CountsOf([&] {
      CheckOk(instance_->Backward({.activation = kept_, .dy = x_, .dx = absl::MakeSpan(y_)}));
    });
  }
  Counts Step() {
    const GroupRates rates[] = {{.learning_rate = 1e-3}};
    return CountsOf([&] { Value(instance_->Step({.groups = rates})); });
  }

 private:
  template <class Call>
  Counts CountsOf(const Call& call) {
    counts_ = {};
    call();
    return counts_;
  }

  const CallRows rows_;
  Counts counts_;
  cuda::CudaBackend backend_;
  std::unique_ptr<ModuleEngine> engine_;
  std::shared_ptr<const ModuleDescription> module_;
  std::unique_ptr<ModuleInstance> instance_;
  Bytes x_, y_;
  ActivationId kept_ = 0;
};

TEST(ModuleLaunches, AreOneACallWhateverLayersItHas) {
  CountedModule module(BertLayers({.layers = 2, .element = ElementType::kFloat16}), Fusion::kBound);
  EXPECT_EQ(module.Forward().launches, 1);
  EXPECT_EQ(module.Backward().launches, 1);
  // The norm of the gradients, then what follows from it.
  EXPECT_EQ(module.Step().launches, 2);
}

TEST(ModuleLaunches, RunTheFirstLayerAndTheLastOneInPartsOfACall) {
  const ModuleLayout layers = BertLayers({.layers = 3, .element = ElementType::kFloat16});
  const int64_t bytes = 2 * 64 * layers.width * 2;
  for (const auto& [part_bytes, runs] :
       {std::pair<int64_t, int>(bytes, 3), {bytes / 2, 3 + 2}, {0, 3}}) {
    CountedModule module(layers, Fusion::kBound, Architecture::kSm90, nullptr,
                         {.batch = 2, .length = 64}, part_bytes);
    Counts forward = module.Forward();
    EXPECT_EQ(forward.launches, 1);
    EXPECT_EQ(forward.kernels[KernelKind::kProductRowsRows], runs * (6 - 2)) << part_bytes;
  }
}

// Kernels of single numbers, of chains of them, of norms, and of sums over columns.
std::vector<int> PointwiseOf(Counts counts) {
  std::vector<int> kernels;
  for (KernelKind kind : {KernelKind::kDenseNumbers, KernelKind::kDenseChain,
                          KernelKind::kDenseNorm, KernelKind::kDenseColumnSums}) {
    kernels.push_back(counts.kernels[kind]);
  }
  return kernels;
}

TEST(ModuleLaunches, OfProductsThatDoNotDependOnEachOtherAreOneKernel) {
  const ModuleLayout layers = BertLayers({.layers = 2, .element = ElementType::kFloat16});
  CountedModule module(layers, Fusion::kBound, Architecture::kSm90);
  // A layer's q, k and v.
  EXPECT_EQ(module.Forward().kernels[KernelKind::kProductRowsRows], 2 * (6 - 2));
  // Gradients of inputs, three of which are added up, and all of a layer's weights.
  Counts backward = module.Backward();
  EXPECT_EQ(backward.kernels[KernelKind::kProductRowsDepth], 2 * (6 - 2));
  EXPECT_EQ(backward.kernels[KernelKind::kProductDepthDepth], 2);
  // On Volta gradients of weights alone, and sums for biases with them.
  CountedModule volta(layers, Fusion::kBound, Architecture::kSm70);
  EXPECT_EQ(volta.Forward().kernels[KernelKind::kProductRowsRows], 2 * 6);
  backward = volta.Backward();
  EXPECT_EQ(backward.kernels[KernelKind::kProductRowsDepth], 2 * 6);
  EXPECT_EQ(backward.kernels[KernelKind::kProductDepthDepth], 2);
  EXPECT_EQ(backward.kernels[KernelKind::kDenseColumnSums], 2 * 2);
}

TEST(ModuleLaunches, OfSegmentsAreOneKernel) {
  const LayerSizes sizes{.dropout = 26, .element = ElementType::kFloat16};
  using Kernels = std::vector<int>;
  {
    CountedModule off(BertLayers(sizes), Fusion::kOff);
    CountedModule bound(BertLayers(sizes), Fusion::kBound);
    // Twice dropout and a sum; gelu, which a product has.
    EXPECT_EQ(PointwiseOf(off.Forward()), (Kernels{5, 0, 2, 0}));
    EXPECT_EQ(PointwiseOf(bound.Forward()), (Kernels{0, 0, 2, 0}));
    // Twice a residual's gradient and dropout beside a norm's; gelu's. Sums of columns wait for
    // each other until what they read is written: eight in three launches.
    const Kernels single = PointwiseOf(off.Backward()), joined = PointwiseOf(bound.Backward());
    EXPECT_EQ(joined, (Kernels{single[0] - 5, 0, 2, 3}));
  }
  {
    CountedModule off(LlamaLayers(sizes), Fusion::kOff);
    CountedModule bound(LlamaLayers(sizes), Fusion::kBound);
    // Two sums, silu and a product; norms of x, of what the first sum gives, and of heads.
    const Kernels single = PointwiseOf(off.Forward()), joined = PointwiseOf(bound.Forward());
    EXPECT_EQ(joined, (Kernels{single[0] - 3, 1, single[2], 0}));  // the last sum is alone
    // The product's two gradients and silu's; a residual's beside the second norm's.
    const Kernels single_back = PointwiseOf(off.Backward());
    const Kernels joined_back = PointwiseOf(bound.Backward());
    EXPECT_EQ(joined_back, (Kernels{single_back[0] - 4, 1, single_back[2], single_back[3]}));
  }
}

TEST(ModuleLaunches, AreAsASearchHasFound) {
  const ModuleLayout layers = BertLayers({.layers = 2, .element = ElementType::kFloat16});
  const ModuleGraph graph = Value(ModuleGraph::Make(layers));
  const int64_t width = graph.layout().width;
  {
    BlockChoice plan = {SingleOps(graph, 0), {}};
    plan.products[{KernelKind::kProductRowsRows, width, width}] = {.apart = true};
    CountedModule module(layers, Fusion::kBound, Architecture::kSm90, &plan);
    Counts forward = module.Forward();
    EXPECT_EQ(forward.kernels[KernelKind::kProductRowsRows], 2 * 6);
    EXPECT_EQ(PointwiseOf(forward),
              PointwiseOf(CountedModule(layers, Fusion::kOff, Architecture::kSm90).Forward()));
  }
  const int small = CountedModule(layers, Fusion::kOff).Forward().small_products;
  for (const bool is_small : {false, true}) {
    BlockChoice plan = {SingleOps(graph, 0), {}};
    plan.products[{KernelKind::kProductRowsRows, width, width}] = {.small = is_small};
    CountedModule module(layers, Fusion::kBound, Architecture::kSm80, &plan);
    const int with = module.Forward().small_products;
    EXPECT_EQ(with, is_small ? small : small - 2 * 4);
  }
}

}  // namespace
}  // namespace attnd
