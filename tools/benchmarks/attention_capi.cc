// An engine behind a few C functions, so that cpu_against_pytorch.py, gpu_peers.py and others can
// time it in PyTorch's own process, in turn with PyTorch. Not installed; tensors are dense bhld, in
// host memory. One thread at a time.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/masks/mask_description.h"
#include "attention/problem.h"
#include "base/status_macros.h"
#include "client/masks/mask_text.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/registry/registry.h"

namespace {

using attnd::Backend;
using attnd::Problem;

struct Engine {
  std::unique_ptr<Backend> backend;
  attnd::LaunchReport report;  // of the last call
  std::unique_ptr<std::byte[]> workspace;
  int64_t workspace_bytes = 0;
  // All calls and heads have this mask; one of them, or none.
  std::shared_ptr<const attnd::MaskDescription> mask;
  std::vector<uint8_t> mask_bits;

  std::byte* Workspace(const Problem& problem, attnd::Direction direction) {
    const int64_t bytes = backend->WorkspaceBytes(problem, direction) + 64;
    if (bytes > workspace_bytes) {
      workspace.reset(new std::byte[bytes]);
      workspace_bytes = bytes;
    }
    return workspace.get() + (64 - reinterpret_cast<uintptr_t>(workspace.get()) % 64) % 64;
  }
};

// `name` of a backend; of "cuda listed", "cuda small" and "cuda residue" the first GPU's, whose
// masks by description go that one way.
absl::StatusOr<std::unique_ptr<Backend>> Make(absl::string_view name, int threads) {
  for (const auto& [forced, way] : {std::pair("cuda listed", attnd::cuda::MaskWay::kListed),
                                    std::pair("cuda small", attnd::cuda::MaskWay::kSmall),
                                    std::pair("cuda residue", attnd::cuda::MaskWay::kResidue)}) {
    if (name != forced) continue;
    ASSIGN_OR_RETURN(auto device, attnd::cuda::MakeDriverDevice({.memory_fraction = 0.1}));
    return std::make_unique<attnd::cuda::CudaBackend>(std::move(device), nullptr, way);
  }
  return attnd::MakeBackend(name, {.cpu_threads = threads, .memory_fraction = 0.2});
}

}  // namespace

extern "C" {

// Laid out alike in cpu_against_pytorch.py.
struct BenchmarkProblem {
  int64_t batch, q_heads, kv_heads, q_len, kv_len, dim;
  int32_t element, causal, dropout_threshold, nondeterministic;
};

// "cpu", "cuda", ... (Make); null, after a line on standard error, where there is none.
void* attnd_benchmark_open(const char* backend, int threads) {
  auto made = Make(backend, threads);
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", made.status().ToString().c_str());
    return nullptr;
  }
  return new Engine{.backend = *std::move(made)};
}

void attnd_benchmark_close(void* engine) { delete static_cast<Engine*>(engine); }

const char* attnd_benchmark_architecture(void* engine) {
  return static_cast<Engine*>(engine)->backend->info().architecture.c_str();
}

// The last call's kernels by name, and their time without transfers.
const char* attnd_benchmark_kernel(void* engine) {
  return static_cast<Engine*>(engine)->report.kernel.c_str();
}
double attnd_benchmark_kernel_seconds(void* engine) {
  return static_cast<Engine*>(engine)->report.seconds;
}

static int Keep(Engine& engine, absl::StatusOr<attnd::LaunchReport> report) {
  if (!report.ok()) {
    std::fprintf(stderr, "%s\n", report.status().ToString().c_str());
    return 1;
  }
  engine.report = *std::move(report);
  return 0;
}

static bool Supports(const Engine& engine, const Problem& problem, attnd::Direction direction) {
  const absl::Status status = engine.backend->Supports(problem, direction);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok();
}

static Problem ProblemOf(const Engine& engine, const BenchmarkProblem& from) {
  Problem p;
  p.batch = from.batch;
  p.q_heads = from.q_heads;
  p.kv_heads = from.kv_heads;
  p.q_len = from.q_len;
  p.kv_len = from.kv_len;
  p.qk_head_dim = p.v_head_dim = from.dim;
  p.element = static_cast<attnd::ElementType>(from.element);
  p.alignment = attnd::Alignment::kTopLeft;
  p.causal = from.causal != 0;
  p.dropout.threshold = static_cast<uint32_t>(from.dropout_threshold);
  p.dropout.seed = 1;
  p.allow_nondeterministic = from.nondeterministic != 0;
  p.mask = engine.mask;
  if (!engine.mask_bits.empty()) {
    p.bool_mask = {.shape = {.batch = 1, .heads = 1, .rows = from.q_len, .columns = from.kv_len}};
  }
  return p;
}

// The mask of the calls that follow: `bits` as of a bool mask, rows of whole bytes; null: none.
// It goes by description, or as the array itself.
int attnd_benchmark_mask(void* handle, const BenchmarkProblem* problem, const uint8_t* bits,
                         int as_array) {
  auto& engine = *static_cast<Engine*>(handle);
  engine.mask = nullptr;
  engine.mask_bits.clear();
  if (bits == nullptr) return 0;
  const int64_t row_bytes = (problem->kv_len + 7) / 8;
  std::vector<uint8_t> copy(bits, bits + problem->q_len * row_bytes);
  if (as_array != 0) {
    engine.mask_bits = std::move(copy);
    return 0;
  }
  auto mask = attnd::MaskDescription::Make(
      {.pattern = {attnd::MaskBitmap{static_cast<uint32_t>(8 * row_bytes), std::move(copy)}},
       .pattern_of = {0}},
      attnd::MaskCallOf(ProblemOf(engine, *problem)));
  if (!mask.ok()) return 1;
  engine.mask = *std::move(mask);
  return 0;
}

// The same, spelled as attnctl takes it.
int attnd_benchmark_mask_text(void* handle, const BenchmarkProblem* problem, const char* text) {
  auto& engine = *static_cast<Engine*>(handle);
  engine.mask = nullptr;
  engine.mask_bits.clear();
  const auto parsed = attnd::masks::ParseMask(text, problem->kv_len);
  if (!parsed.ok()) return 1;
  auto mask =
      attnd::MaskDescription::Make(parsed->Spec(), attnd::MaskCallOf(ProblemOf(engine, *problem)));
  if (!mask.ok()) return 1;
  engine.mask = *std::move(mask);
  return 0;
}

int64_t attnd_benchmark_workspace_bytes(void* engine, const BenchmarkProblem* problem,
                                        int backward) {
  return static_cast<Engine*>(engine)->backend->WorkspaceBytes(
      ProblemOf(*static_cast<Engine*>(engine), *problem),
      backward ? attnd::Direction::kBackward : attnd::Direction::kForward);
}

int attnd_benchmark_forward(void* handle, const BenchmarkProblem* problem, const void* q,
                            const void* k, const void* v, void* o, float* lse) {
  auto* engine = static_cast<Engine*>(handle);
  const Problem p = ProblemOf(*engine, *problem);
  if (!Supports(*engine, p, attnd::Direction::kForward)) return 1;
  attnd::ForwardCall call;
  call.problem = &p;
  call.q = q, call.k = k, call.v = v, call.o = o, call.lse = lse;
  call.mask_bits = engine->mask_bits.data();
  call.workspace = engine->Workspace(p, attnd::Direction::kForward);
  return Keep(*engine, engine->backend->Forward({&call, 1}));
}

int attnd_benchmark_backward(void* handle, const BenchmarkProblem* problem, const void* q,
                             const void* k, const void* v, const void* o, const float* lse,
                             const void* d_o, void* d_q, void* d_k, void* d_v) {
  auto* engine = static_cast<Engine*>(handle);
  const Problem p = ProblemOf(*engine, *problem);
  if (!Supports(*engine, p, attnd::Direction::kBackward)) return 1;
  attnd::BackwardCall call;
  call.problem = &p;
  call.q = q, call.k = k, call.v = v, call.o = o, call.lse = lse, call.d_o = d_o;
  call.d_q = d_q, call.d_k = d_k, call.d_v = d_v;
  call.mask_bits = engine->mask_bits.data();
  call.workspace = engine->Workspace(p, attnd::Direction::kBackward);
  return Keep(*engine, engine->backend->Backward({&call, 1}));
}
}
