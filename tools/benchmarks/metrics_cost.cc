// metrics_cost: what recording costs a call: everything that a successful Forward adds to metrics
// on its way, by one thread and by several at once. Beside what the daemon spends on a small call
// (docs/PERFORMANCE.md) it is the share that metrics take.
//
//   bazel-bin/tools/benchmarks/metrics_cost
#include <benchmark/benchmark.h>

#include "server/metrics/metrics.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

struct Recorder {
  Recorder() : call(DecodedCall(SmallProblem())) { metrics.AddDevice("cpu", BackendInfo()); }
  void RecordOneCall() {
    const absl::Duration took = absl::Microseconds(137);
    const Direction direction = Direction::kForward;
    metrics.CallStarted(Method::kForward);
    metrics.Received(false, 3072);
    metrics.CallAdmitted(call);
    metrics.HostCopied(3072);
    metrics.QueueChanged(0, direction, Priority::kNormal, 1, 8192);
    metrics.QueueChanged(0, direction, Priority::kNormal, -1, -8192);
    metrics.KernelRan({0, direction, ElementType::kFloat16, "cpu_forward_f32", 64}, 50e-6, 1e6);
    metrics.BatchRun(direction, 1, 16);
    metrics.Sent(false, 1152);
    for (int stage = 0; stage < kRequestStages; ++stage) {
      metrics.StageTook(Method::kForward, static_cast<RequestStage>(stage), took);
    }
    metrics.CallQueued(direction, Priority::kNormal, took);
    metrics.CallFinished(Method::kForward, absl::StatusCode::kOk, "", took);
  }
  Metrics metrics;
  const AttentionCall call;
};

void BM_RecordOneCall(benchmark::State& state) {
  static Recorder& recorder = *new Recorder();
  for (auto _ : state) recorder.RecordOneCall();
}
BENCHMARK(BM_RecordOneCall)->ThreadRange(1, 8)->UseRealTime()->MeasureProcessCPUTime();

}  // namespace
}  // namespace attnd

BENCHMARK_MAIN();
