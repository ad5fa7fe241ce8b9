#include "kernels/layers/cuda/cuda_module_engine.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/layers/cuda/cuda_device.h"
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
  CudaModuleEngine(cuda::CudaBackend& attention, HoldDeviceMemory hold, CutBlocks cut,
                   std::shared_ptr<const Nccl> nccl)
      : attention_(attention),
        hold_(std::move(hold)),
        cut_(std::move(cut)),
        nccl_(std::move(nccl)) {}

  std::string Name() const override { return "cuda"; }
  int ReplicaVersion(const EnginePlan&) const override {
    return nccl_ == nullptr ? 0 : nccl_->version();
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
    const std::vector<BlockEnds> segments = cut_(module->graph, limits);
    return ExecutorInstance::Make(std::move(module), limits, plan,
                                  std::make_unique<CudaDevice>(attention_, hold_, nccl_.get()),
                                  segments);
  }

 private:
  cuda::CudaBackend& attention_;
  const HoldDeviceMemory hold_;
  const CutBlocks cut_;
  const std::shared_ptr<const Nccl> nccl_;
};

}  // namespace

CutBlocks CutsOnGpu(Fusion fusion, const BackendInfo& gpu) {
  return [fusion, rates = GpuOfArchitecture(gpu.architecture)](const ModuleGraph& graph,
                                                               const ModuleLimits& limits) {
    return CutsOf(fusion, graph, {limits.max_rows, limits.max_memory_rows}, rates);
  };
}

std::unique_ptr<ModuleEngine> MakeCudaModuleEngine(cuda::CudaBackend& attention,
                                                   HoldDeviceMemory hold, CutBlocks cut,
                                                   std::shared_ptr<const Nccl> nccl) {
  if (cut == nullptr) cut = CutsOnGpu(Fusion::kBound, attention.info());
  return std::make_unique<CudaModuleEngine>(attention, std::move(hold), std::move(cut),
                                            std::move(nccl));
}

Device GpuDeviceOf(std::unique_ptr<cuda::CudaBackend> attention, Fusion fusion,
                   std::shared_ptr<const Nccl> nccl) {
  cuda::CudaBackend& engine = *attention;
  return {std::move(attention), [&engine, fusion, nccl](HoldDeviceMemory hold) {
            return MakeCudaModuleEngine(engine, std::move(hold), CutsOnGpu(fusion, engine.info()),
                                        nccl);
          }};
}

}  // namespace attnd
