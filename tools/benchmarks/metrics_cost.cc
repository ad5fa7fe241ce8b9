// metrics_cost: what recording costs a call: everything that a successful Forward adds to metrics
// on its way, by one thread and by several at once; and what a trace costs it: reading where it
// stands, and, of a sampled one, its spans. Beside what the daemon spends on a small call
// (docs/figures/daemon.md) it is the share that metrics and traces take.
//
//   bazel-bin/tools/benchmarks/metrics_cost
#include <benchmark/benchmark.h>

#include "server/metrics/metrics.h"
#include "server/metrics/span_export.h"
#include "server/metrics/trace_context.h"
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

constexpr char kTraceparent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

void BM_ReadTraceparent(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(ParseTraceparent(kTraceparent));
}
BENCHMARK(BM_ReadTraceparent);

CallSpan SpanOfOneCall() {
  CallSpan span{.trace = ParseTraceparent(kTraceparent),
                .name = "attnd.v1.Attention/Forward",
                .begin = absl::UnixEpoch(),
                .end = absl::UnixEpoch() + absl::Milliseconds(1),
                .attributes = {{"rpc.system", "grpc"}, {"attnd.request_id", "0123456789"}}};
  for (const char* stage : {"receive", "queue", "upload", "kernel", "download", "send"}) {
    span.stages.push_back({stage, span.begin, span.end});
  }
  return span;
}

// With its share of a full request to the collector, but for writing that.
void BM_SpansOfOneCall(benchmark::State& state) {
  for (auto _ : state) {
    std::vector<CallSpan> spans;
    for (size_t n = 0; n < SpanExport::kMostAtOnce; ++n) spans.push_back(SpanOfOneCall());
    benchmark::DoNotOptimize(OtlpJson(spans, "0.1.0"));
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(SpanExport::kMostAtOnce));
}
BENCHMARK(BM_SpansOfOneCall);

}  // namespace
}  // namespace attnd

BENCHMARK_MAIN();
