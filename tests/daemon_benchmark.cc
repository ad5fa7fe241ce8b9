// What the daemon adds to a call, and how many bytes it moves: a daemon in this process on the CPU
// engine, generated stubs as clients (so the client's own copies count too).
//
//   bazel run //tests:daemon_benchmark
#include <benchmark/benchmark.h>
#include <grpcpp/grpcpp.h>
#include <malloc.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/daemon_fixture.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

Problem LatencyProblem() {
  Problem p = SmallProblem(128, 1);
  p.qk_head_dim = p.v_head_dim = 64;
  return p;
}

ServerOptions UnixOptions() {
  ServerOptions options = TestOptions();
  options.listen = {absl::StrCat("unix:/tmp/attnd_benchmark_", getpid(), ".sock")};
  options.metrics_listen = "";
  return options;
}

void EngineAlone(benchmark::State& state) {
  std::unique_ptr<Backend> engine = MakeCpuBackend({});
  Problem problem = LatencyProblem();
  v1::ForwardRequest request = MakeForward(problem, 1);
  double seconds = 0;
  for (auto _ : state) benchmark::DoNotOptimize(ComputeForward(*engine, problem, request));
  state.counters["kernel_s"] = seconds;
}
BENCHMARK(EngineAlone)->Unit(benchmark::kMicrosecond)->UseRealTime();

void ThroughDaemon(benchmark::State& state) {
  Daemon daemon(MakeCpuBackend({}), UnixOptions());
  v1::ForwardRequest request = MakeForward(LatencyProblem(), 1);
  uint64_t kernel = 0, queue = 0, receive = 0, landing = 0;
  for (auto _ : state) {
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    grpc::Status status = daemon.stub().Forward(&context, request, &reply);
    if (!status.ok()) state.SkipWithError(status.error_message().c_str());
    receive += reply.receipt().stage(0).nanoseconds();
    queue += reply.receipt().stage(1).nanoseconds();
    landing += reply.receipt().stage(2).nanoseconds();
    kernel += reply.receipt().stage(3).nanoseconds();
  }
  auto mean_us = [&](uint64_t sum) { return double(sum) / 1e3 / double(state.iterations()); };
  state.counters["receive_us"] = mean_us(receive);
  state.counters["queue_us"] = mean_us(queue);
  state.counters["landing_us"] = mean_us(landing);
  state.counters["kernel_us"] = mean_us(kernel);
}
BENCHMARK(ThroughDaemon)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(2);

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  mallopt(M_TRIM_THRESHOLD, 2000000000);
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
