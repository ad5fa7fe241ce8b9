// Measures what the daemon adds to a small call, and how many bytes it moves in echo-like calls
// (one key, so that q in and o out are everything). The daemon runs in this process on the CPU
// engine; clients are gRPC's own, with raw messages, so that no protobuf copy of theirs counts.
//
//   bazel run //tools/benchmarks:daemon_benchmark            two cores: taskset -c 0,1
//   bazel-bin/tests/...
#include <benchmark/benchmark.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cpu/cpu_backend.h"
#include "net/process_tuning.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

double Quantile(std::vector<double>& values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

double KernelMicroseconds(const v1::Receipt& receipt) {
  for (const v1::Stage& stage : receipt.stage()) {
    if (stage.name() == "kernel") return static_cast<double>(stage.nanoseconds()) / 1e3;
  }
  return 0;
}

// N = 128, D = 64, one head, float32, one call at a time: wall time at the client less the time in
// the engine, as the receipt tells it.
void SmallCall(benchmark::State& state) {
  ServerOptions options = TestOptions();
  bool unix_socket = state.range(0) == 1;
  if (unix_socket) options.listen = {absl::StrCat("unix:/tmp/attnd_benchmark_", getpid(), ".sock")};
  Daemon daemon(MakeCpuBackend({}), options);
  Problem problem = SmallProblem(128, 1);
  problem.qk_head_dim = problem.v_head_dim = 64;
  v1::ForwardRequest request = MakeForward(problem, 1);
  std::vector<double> wall, kernel, added;
  for (auto _ : state) {
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    absl::Time begin = absl::Now();
    grpc::Status status = daemon.stub().Forward(&context, request, &reply);
    double microseconds = absl::ToDoubleMicroseconds(absl::Now() - begin);
    if (!status.ok()) state.SkipWithError(status.error_message().c_str());
    wall.push_back(microseconds);
    kernel.push_back(KernelMicroseconds(reply.receipt()));
    added.push_back(microseconds - kernel.back());
  }
  state.SetLabel(unix_socket ? "unix socket" : "tcp");
  state.counters["wall_p50_us"] = Quantile(wall, 0.5);
  state.counters["kernel_p50_us"] = Quantile(kernel, 0.5);
  state.counters["added_p50_us"] = Quantile(added, 0.5);
  state.counters["added_p99_us"] = Quantile(added, 0.99);
}
BENCHMARK(SmallCall)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond)->MinTime(2);

// One channel that keeps `depth` calls in flight until `stop`.
int64_t EchoOnOneChannel(const Daemon& daemon, const grpc::ByteBuffer& request, int depth,
                         const std::atomic<bool>& stop) {
  struct Call {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
    grpc::ByteBuffer reply;
    grpc::Status status;
  };
  grpc::GenericStub stub(daemon.NewChannel());
  grpc::CompletionQueue queue;
  std::vector<Call> calls(static_cast<size_t>(depth));
  auto start = [&](Call& call) {
    call.context = std::make_unique<grpc::ClientContext>();
    call.reader =
        stub.PrepareUnaryCall(call.context.get(), "/attnd.v1.Attention/Forward", request, &queue);
    call.reader->StartCall();
    call.reader->Finish(&call.reply, &call.status, &call);
  };
  for (Call& call : calls) start(call);
  int64_t done = 0;
  for (int running = depth; running > 0;) {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    auto& call = *static_cast<Call*>(tag);
    CHECK(call.status.ok()) << call.status.error_message();
    call.reply.Clear();
    ++done;
    stop ? --running, void() : start(call);
  }
  return done;
}

// 8 MiB of q in and of o out, `channels` connections, two calls in flight on each.
void Echo(benchmark::State& state) {
  int channels = static_cast<int>(state.range(0));
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = int64_t{1} << 30;
  Daemon daemon(MakeCpuBackend({}), options);
  Problem problem = SmallProblem(16384, 1);
  problem.kv_len = 1;
  problem.qk_head_dim = problem.v_head_dim = 128;
  v1::ForwardRequest message = MakeForward(problem, 1);
  message.set_want_lse(false);
  grpc::Slice slice(message.SerializeAsString());
  grpc::ByteBuffer request(&slice, 1);
  int64_t calls = 0;
  for (auto _ : state) {
    std::atomic<bool> stop{false};
    std::atomic<int64_t> done{0};
    std::vector<std::thread> threads;
    for (int n = 0; n < channels; ++n) {
      threads.emplace_back([&] { done += EchoOnOneChannel(daemon, request, 2, stop); });
    }
    absl::SleepFor(absl::Seconds(2));
    stop = true;
    for (std::thread& thread : threads) thread.join();
    calls += done;
  }
  state.counters["GB/s_each_way"] =
      benchmark::Counter(static_cast<double>(calls) * 8.388608e-3, benchmark::Counter::kIsRate);
}
BENCHMARK(Echo)->Arg(1)->Arg(4)->Arg(8)->UseRealTime()->Iterations(1)->Unit(benchmark::kSecond);

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
