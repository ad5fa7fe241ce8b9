// Time of one BERT layer on the CPU engine, forward and backward as training runs them, and of an
// AdamW step. A round for each line of standard input, so that another program may take turns
// (tools/benchmarks/module_layer_against_pytorch.py), and a line of milliseconds for each round:
//     yes | head -9 |
//       bazel run //kernels/layers/cpu:module_benchmark -- WIDTH DROPOUT/256 ELEMENT THREADS
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "modules/known_layers.h"

namespace attnd {
namespace {

constexpr int64_t kBatch = 4, kLength = 512;

template <class T>
T Value(absl::StatusOr<T> result) {
  CHECK(result.ok()) << result.status().ToString();
  return *std::move(result);
}

std::vector<std::byte> RandomBytes(Random& random, ElementType element, int64_t count,
                                   double scale) {
  std::vector<std::byte> bytes(count * ElementBytes(element));
  for (int64_t n = 0; n < count; ++n) {
    StoreElement(element, bytes.data(), n, static_cast<float>(scale * random.Normal()));
  }
  return bytes;
}

class Case {
 public:
  Case(ModuleEngine& engine, ModuleLayout layout) : random_(1) {
    OptimizerSpec adamw{
        .kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    module_ = std::make_shared<ModuleDescription>(Value(ModuleGraph::Make(std::move(layout))),
                                                  std::move(adamw));
    rows_ = {.batch = kBatch, .length = kLength};
    const ModuleLimits limits{.max_rows = rows_.rows(), .kept_rows = rows_.rows()};
    const EnginePlan plan = Value(engine.Plan(*module_, limits, int64_t{1} << 34));
    instance_ = Value(engine.Make(module_, limits, plan));
    for (size_t n = 0; n < module_->table.entries().size(); ++n) {
      const int64_t count = module_->table.entries()[n].elements;
      CHECK(instance_
                ->Put(n, TensorRole::kWeight, ElementType::kFloat32,
                      RandomBytes(random_, ElementType::kFloat32, count, 0.02))
                .ok());
    }
    const int64_t numbers = rows_.rows() * module_->graph.layout().width;
    x_ = RandomBytes(random_, module_->graph.layout().element, numbers, 1);
    y_ = dx_ = x_;
  }

  void RunOnce() {
    ActivationId kept = 0;
    const double forward = MillisecondsOf([&] {
      kept = Value(instance_->Forward({.rows = &rows_,
                                       .dropout = {.is_training = true, .seed = 1},
                                       .x = x_,
                                       .keep = true,
                                       .y = absl::MakeSpan(y_)}));
    });
    const double backward = MillisecondsOf([&] {
      CHECK(instance_->Backward({.activation = kept, .dy = x_, .dx = absl::MakeSpan(dx_)}).ok());
    });
    instance_->DropActivation(kept);
    const GroupRates rates[] = {{.learning_rate = 1e-4, .weight_decay = 0.01}};
    const double step = MillisecondsOf([&] { Value(instance_->Step({.groups = rates})); });
    std::printf("%.3f %.3f %.3f\n", forward, backward, step);
    std::fflush(stdout);
  }

 private:
  template <class Body>
  static double MillisecondsOf(const Body& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    return spent.count();
  }

  Random random_;
  std::shared_ptr<const ModuleDescription> module_;
  std::unique_ptr<ModuleInstance> instance_;
  CallRows rows_;
  std::vector<std::byte> x_, y_, dx_;
};

int Main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: module_benchmark WIDTH DROPOUT/256 float32|bfloat16 THREADS\n");
    return 2;
  }
  const int64_t width = std::atoi(argv[1]);
  const int threads = std::atoi(argv[4]);
  const bool is_wide = std::string(argv[3]) == "float32";
  const LayerSizes sizes{.width = width,
                         .heads = width / 64,
                         .kv_heads = width / 64,
                         .inner = 4 * width,
                         .dropout = static_cast<uint32_t>(std::atoi(argv[2])),
                         .element = is_wide ? ElementType::kFloat32 : ElementType::kBFloat16};
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = threads});
  const std::unique_ptr<ModuleEngine> engine = MakeCpuModuleEngine(threads, *backend);
  Case layer(*engine, BertLayers(sizes));
  for (std::string line; std::getline(std::cin, line);) layer.RunOnce();
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
