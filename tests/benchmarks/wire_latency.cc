// What a small call costs beyond the engine's own time: one head, N = 128, D = 64, float32, over a
// unix socket, one caller, through shared memory and with the tensors in the messages. The daemon
// is a process of its own with the same engine and as many threads as the one called here directly.
// The two are called in turns of 50, so that a busy machine slows both; the figure is the
// difference of the medians.
//
//     bazel build //server:attnd //tests/benchmarks:wire_latency
//     bazel-bin/tests/benchmarks/wire_latency bazel-bin/server/attnd
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "base/transport_tuning.h"
#include "client/cpp/attention_client.h"
#include "kernels/cpu/cpu_backend.h"

namespace attnd {
namespace {

constexpr int kRounds = 40, kCallsATurn = 50;

Problem SmallProblem() {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = p.kv_len = 128;
  p.qk_head_dim = p.v_head_dim = 64;
  return p;
}

// A daemon on a unix socket, ended with SIGTERM when it goes.
class DaemonProcess {
 public:
  explicit DaemonProcess(const char* binary)
      : socket_(absl::StrCat("/tmp/attnd_wire_latency.", getpid())), pid_(fork()) {
    if (pid_ != 0) return;
    std::string listen = absl::StrCat("unix:", socket_);
    execl(binary, binary, "--listen", listen.c_str(), "--backend", "cpu", "--metrics_listen",
          "127.0.0.1:0", "--drain_delay", "0", "--log_level", "error", nullptr);
    std::perror(binary);
    _exit(1);
  }
  ~DaemonProcess() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  std::string address() const { return absl::StrCat("unix:", socket_); }

 private:
  const std::string socket_;
  const pid_t pid_;
};

class Comparison {
 public:
  Comparison(const std::string& address, bool shares)
      : p_(SmallProblem()),
        in_(RandomInputs(p_, 1)),
        o_(p_.OutputElements() * 4),
        lse_(p_.LseElements() * 4),
        engine_(MakeCpuBackend({})),
        workspace_(engine_->WorkspaceBytes(p_, Direction::kForward)),
        client_(*AttentionClient::Connect({.addresses = {address},
                                           .wait_for_ready = true,
                                           .shared_memory_bytes = shares ? int64_t{1} << 30 : 0})) {
    // A client that finds no daemon yet looks for shared memory only seconds later.
    CHECK(client_->GetServerInfo().ok());
  }

  void Run() {
    for (int round = -2; round < kRounds; ++round) {  // two rounds to warm up
      for (int n = 0; n < kCallsATurn; ++n) Note(round, engine_times_, [this] { CallEngine(); });
      for (int n = 0; n < kCallsATurn; ++n) Note(round, daemon_times_, [this] { CallDaemon(); });
    }
  }

  void Print() {
    std::sort(engine_times_.begin(), engine_times_.end());
    std::sort(daemon_times_.begin(), daemon_times_.end());
    std::printf("%zu calls each, unix socket, b1 h1 N128 D64 float32; microseconds\n",
                engine_times_.size());
    std::printf("           p50      p90      p99\n");
    PrintRow("engine", engine_times_);
    PrintRow("daemon", daemon_times_);
    std::printf("added %9.1f, tensors in %s\n", At(daemon_times_, 0.5) - At(engine_times_, 0.5),
                receipt_.shared > 0 ? "shared memory" : "the messages");
    for (const CallReceipt::Stage& stage : receipt_.stages) {
      std::printf("  last call: %s %.1f\n", stage.name.c_str(),
                  absl::ToDoubleMicroseconds(stage.total));
    }
  }

 private:
  template <class Call>
  void Note(int round, std::vector<double>& times, const Call& call) {
    absl::Time start = absl::Now();
    call();
    double microseconds = absl::ToDoubleMicroseconds(absl::Now() - start);
    if (round >= 0) times.push_back(microseconds);
  }
  void CallEngine() {
    ForwardCall call{.problem = &p_,
                     .q = in_.q.data(),
                     .k = in_.k.data(),
                     .v = in_.v.data(),
                     .o = o_.data(),
                     .lse = lse_.as<float>(),
                     .workspace = workspace_.data()};
    CHECK(engine_->Forward({call}).ok());
  }
  void CallDaemon() {
    absl::StatusOr<CallReceipt> receipt =
        client_->Forward(p_, {.q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()},
                         {.o = o_.data(), .lse = lse_.as<float>()});
    CHECK(receipt.ok()) << receipt.status().ToString();
    receipt_ = *std::move(receipt);
  }
  static double At(const std::vector<double>& ascending, double quantile) {
    return ascending[static_cast<size_t>(quantile * static_cast<double>(ascending.size() - 1))];
  }
  static void PrintRow(const char* name, const std::vector<double>& times) {
    std::printf("%s %8.1f %8.1f %8.1f\n", name, At(times, 0.5), At(times, 0.9), At(times, 0.99));
  }

  const Problem p_;
  const ProblemInputs in_;
  AlignedBytes o_, lse_;
  const std::unique_ptr<Backend> engine_;
  AlignedBytes workspace_;
  const std::unique_ptr<AttentionClient> client_;
  std::vector<double> engine_times_, daemon_times_;
  CallReceipt receipt_;
};

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s path/to/attnd\n", argv[0]);
    return 2;
  }
  TuneForTransport();
  DaemonProcess daemon(argv[1]);
  for (bool shares : {true, false}) {
    Comparison comparison(daemon.address(), shares);
    comparison.Run();
    comparison.Print();
  }
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
