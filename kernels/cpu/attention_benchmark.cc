// The CPU engine's speed: forward and backward by length, head dimension, mask, element and
// dropout; one call of batch 1, 4 heads. flops are 2·pairs·(dims) forward, 2.5 times that backward.
//
//     bazel run //kernels/cpu:attention_benchmark -- --benchmark_filter=Forward
//
// ATTND_THREADS sets the threads (default 1). Against PyTorch:
// tools/benchmarks/cpu_against_pytorch.py; figures: docs/PERFORMANCE.md. Upper limit, 6×64 register
// tile alone: 114 GFLOP/s in one thread of an AMD EPYC (Zen 4, AVX-512), which multiplies and adds
// one 16-lane vector per clock.
#include <benchmark/benchmark.h>

#include <cstdlib>

#include "attention/cost.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"

namespace attnd {
namespace {

Backend& Engine() {
  static const std::unique_ptr<Backend> engine = [] {
    const char* threads = std::getenv("ATTND_THREADS");
    return MakeCpuBackend({.threads = threads != nullptr ? std::atoi(threads) : 1});
  }();
  return *engine;
}

// Arguments: length, head dimension, causal, element, dropout threshold.
Problem ProblemOf(const benchmark::State& state) {
  Problem p = PlainProblem(1, 4, state.range(0), state.range(1));
  p.causal = state.range(2) != 0;
  p.element = static_cast<ElementType>(state.range(3));
  p.dropout = {.threshold = static_cast<uint32_t>(state.range(4)), .seed = 1};
  return p;
}

void Report(benchmark::State& state, const Problem& p, Direction direction) {
  state.counters["flops"] =
      benchmark::Counter(Flops(p, direction), benchmark::Counter::kIsIterationInvariantRate);
  state.counters["workspace_bytes"] = static_cast<double>(Engine().WorkspaceBytes(p, direction));
}

struct Forwarded {
  explicit Forwarded(const Problem& p)
      : inputs(RandomInputs(p, 1)),
        o(p.OutputElements() * ElementBytes(p.element)),
        lse(p.LseElements() * 4),
        workspace(Engine().WorkspaceBytes(p, Direction::kForward)) {
    call.problem = &p;
    call.q = inputs.q.data(), call.k = inputs.k.data(), call.v = inputs.v.data();
    call.o = o.data(), call.lse = lse.as<float>(), call.workspace = workspace.data();
  }
  void Run() { CHECK(Engine().Forward({&call, 1}).ok()); }

  ProblemInputs inputs;
  AlignedBytes o, lse, workspace;
  ForwardCall call;
};

void Forward(benchmark::State& state) {
  const Problem p = ProblemOf(state);
  Forwarded forward(p);
  for (auto _ : state) forward.Run();
  Report(state, p, Direction::kForward);
}

void Backward(benchmark::State& state) {
  const Problem p = ProblemOf(state);
  Forwarded forward(p);
  forward.Run();
  const int64_t bytes = ElementBytes(p.element);
  AlignedBytes d_q(p.QueryElements() * bytes), d_k(p.KeyElements() * bytes),
      d_v(p.ValueElements() * bytes), workspace(Engine().WorkspaceBytes(p, Direction::kBackward));
  BackwardCall call;
  call.problem = &p;
  call.q = forward.call.q, call.k = forward.call.k, call.v = forward.call.v;
  call.o = forward.o.data(), call.lse = forward.lse.as<float>();
  call.d_o = forward.inputs.d_o.data();
  call.d_q = d_q.data(), call.d_k = d_k.data(), call.d_v = d_v.data();
  call.workspace = workspace.data();
  for (auto _ : state) CHECK(Engine().Backward({&call, 1}).ok());
  Report(state, p, Direction::kBackward);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  constexpr int kFloat32 = static_cast<int>(ElementType::kFloat32);
  benchmark->ArgNames({"n", "d", "causal", "element", "dropout"});
  for (int length : {512, 2048}) {
    for (int dim : {64, 128}) {
      for (int causal : {0, 1}) benchmark->Args({length, dim, causal, kFloat32, 0});
    }
  }
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    benchmark->Args({2048, 64, 0, static_cast<int>(element), 0});
  }
  benchmark->Args({2048, 64, 0, kFloat32, 26})->Unit(benchmark::kMillisecond);
}

BENCHMARK(Forward)->Apply(Shapes)->MeasureProcessCPUTime();
BENCHMARK(Backward)->Apply(Shapes)->MeasureProcessCPUTime();

}  // namespace
}  // namespace attnd

BENCHMARK_MAIN();
