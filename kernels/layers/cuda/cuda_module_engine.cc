#include "kernels/layers/cuda/cuda_module_engine.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "kernels/layers/cuda/device_bench.h"
#include "kernels/layers/executor/executor_instance.h"

namespace attnd {
namespace {

// Makes the Problem of one row.
Problem ProblemOfOp(const AttentionOp& op, ElementType element) {
  Problem p = op.options;
  p.batch = p.q_len = p.kv_len = 1;
  p.q_heads = op.q.heads;
  p.kv_heads = op.k.heads;
  p.qk_head_dim = op.q.dim;
  p.v_head_dim = op.v.dim;
  p.element = element;
  p.layout = Layout::kBlhd;
  return p;
}

class CudaModuleEngine : public ModuleEngine {
 public:
  CudaModuleEngine(cuda::CudaBackend& attention, CudaModuleOptions options)
      : attention_(attention), options_(std::move(options)) {}

  std::string Name() const override { return "cuda"; }
  int ReplicaVersion(const EnginePlan&) const override {
    return options_.nccl == nullptr ? 0 : options_.nccl->version();
  }

  absl::Status Supports(const ModuleGraph& graph) const override {
    const ModuleLayout& layout = graph.layout();
    for (size_t block = 0; block < layout.blocks.size(); ++block) {
      for (int64_t op : graph.shapes(block).attention_ops) {
        const Problem p =
            ProblemOfOp(std::get<AttentionOp>(layout.blocks[block].ops[op].kind), layout.element);
        for (Direction direction : {Direction::kForward, Direction::kBackward}) {
          const absl::Status status = attention_.SupportsInPlace(p, direction);
          if (status.ok()) continue;
          return absl::Status(status.code(), absl::StrCat("block[", block, "].op[", op,
                                                          "].attention: ", status.message()));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module, const ModuleLimits& limits,
                                  const MemoryBudget& budget) const override {
    return ExecutorInstance::Plan(module, limits, budget.OnDevice(0), CudaDevice(attention_));
  }

  absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) override {
    const std::vector<BlockEnds> segments = options_.cut(module->graph, limits);
    auto device = std::make_unique<CudaDevice>(attention_, options_.hold, options_.nccl.get());
    CudaDevice& gpu = *device;
    gpu.SetPartBytes(options_.part_bytes);
    ASSIGN_OR_RETURN(
        std::unique_ptr<ExecutorInstance> instance,
        ExecutorInstance::Make(std::move(module), limits, plan, std::move(device), segments));
    if (options_.search != nullptr) RETURN_IF_ERROR(Search(*instance, gpu, limits));
    return instance;
  }

  SearchTotals Searches() const override {
    return options_.search == nullptr ? SearchTotals() : options_.search->totals();
  }

 private:
  absl::Status Search(ExecutorInstance& instance, CudaDevice& gpu, const ModuleLimits& limits) {
    ASSIGN_OR_RETURN(PlanSearch::Choice choice,
                     options_.search->Choose(
                         instance.description().graph, limits,
                         [&]() -> absl::StatusOr<std::unique_ptr<SegmentBench>> {
                           ASSIGN_OR_RETURN(std::unique_ptr<DeviceBench> made,
                                            DeviceBench::Make(instance, gpu, options_.clock));
                           return made;
                         }));
    gpu.Tune(std::move(choice.tuning));
    return instance.Cut(choice.blocks);
  }

  cuda::CudaBackend& attention_;
  const CudaModuleOptions options_;
};

}  // namespace

CutBlocks CutsOnGpu(Fusion fusion, const BackendInfo& gpu) {
  return [fusion, rates = GpuOfArchitecture(gpu.architecture)](const ModuleGraph& graph,
                                                               const ModuleLimits& limits) {
    return CutsOf(fusion, graph, {limits.max_rows, limits.max_memory_rows}, rates);
  };
}

std::unique_ptr<ModuleEngine> MakeCudaModuleEngine(cuda::CudaBackend& attention,
                                                   CudaModuleOptions options) {
  if (options.cut == nullptr) options.cut = CutsOnGpu(Fusion::kBound, attention.info());
  return std::make_unique<CudaModuleEngine>(attention, std::move(options));
}

std::shared_ptr<PlanSearch> SearchOnGpu(cuda::CudaBackend& attention,
                                        std::shared_ptr<PlanCache> cache) {
  const BackendInfo& info = attention.info();
  return std::make_shared<PlanSearch>(
      absl::StrCat(info.device, " ", info.architecture, ", ", info.flops_per_second, " FLOP/s, ",
                   attention.device().Versions()),
      GpuOfArchitecture(info.architecture), std::move(cache));
}

Device GpuDeviceOf(std::unique_ptr<cuda::CudaBackend> attention, Fusion fusion,
                   std::shared_ptr<const Nccl> nccl, std::shared_ptr<PlanCache> plans) {
  cuda::CudaBackend& engine = *attention;
  std::shared_ptr<PlanSearch> search;
  if (fusion == Fusion::kMeasured) search = SearchOnGpu(engine, std::move(plans));
  return {std::move(attention), [&engine, fusion, nccl, search](HoldDeviceMemory hold) {
            return MakeCudaModuleEngine(engine, {.hold = std::move(hold),
                                                 .cut = CutsOnGpu(fusion, engine.info()),
                                                 .nccl = nccl,
                                                 .search = search});
          }};
}

}  // namespace attnd
