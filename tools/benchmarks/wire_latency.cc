// Measures what a small call costs beyond the engine's own time, beside the least that gRPC needs
// for as many bytes (minimal_echo.h). One caller over TCP on the loopback device or a unix socket:
//
//   4 KiB     4 rows of 256 float32, one key
//   N = 128   one head, N = 128, D = 64, float32: 96 KiB there, through shared memory too
//
// Daemons are processes of their own. All of a case are called in turns of 50, so that a busy
// machine slows them alike. Beside the times: how often the daemon's threads went to sleep during a
// call, and the processor time that the call took of the caller's thread and of the daemon.
//
//     bazel build //server:attnd //tools/benchmarks:wire_latency
//     bazel-bin/tools/benchmarks/wire_latency bazel-bin/server/attnd [FLAG OF attnd]...
//
// For an instruction counter, which a busy machine does not disturb, either side alone:
//
//     wire_latency echo queue|callback ADDRESS        serves the minimal echo
//     wire_latency calls attnd|echo ADDRESS COUNT     calls of 4 KiB in a row, in CountedCalls
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/cost.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "net/process_tuning.h"
#include "tools/benchmarks/minimal_echo.h"
#include "tools/benchmarks/turns.h"

namespace attnd {
namespace {

constexpr int kFirstPort = 17070;

Problem OneHead(int64_t q_len, int64_t kv_len, int64_t head_dim) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = head_dim;
  return p;
}

// attnd's call of one problem, and the engine's.
class Caller {
 public:
  Caller(const Problem& problem, const std::string& address, bool shares)
      : p_(problem),
        in_(RandomInputs(p_, 1)),
        o_(p_.OutputElements() * 4),
        lse_(p_.LseElements() * 4),
        engine_(MakeCpuBackend({})),
        workspace_(engine_->WorkspaceBytes(p_, Direction::kForward)),
        client_(*AttentionClient::Connect({.addresses = {address},
                                           .channels_per_address = 1,
                                           .wait_for_ready = true,
                                           .shared_memory_bytes = shares ? int64_t{1} << 30 : 0})) {
    // A client that finds no daemon yet looks for shared memory only seconds later.
    CHECK(client_->GetServerInfo().ok());
  }
  void CallDaemon() {
    auto receipt = client_->Forward(p_, {.q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()},
                                    {.o = o_.data()});
    CHECK(receipt.ok()) << receipt.status().ToString();
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

 private:
  const Problem p_;
  const ProblemInputs in_;
  AlignedBytes o_, lse_;
  const std::unique_ptr<Backend> engine_;
  AlignedBytes workspace_;
  const std::unique_ptr<AttentionClient> client_;
};

struct Servers {
  std::string attnd, callback, queue;  // addresses
  const ServerProcess *attnd_process, *callback_process, *queue_process;
};

void Measure(const std::string& title, const Problem& p, const Servers& at, bool shares) {
  Caller sends(p, at.attnd, false), shared(p, at.attnd, shares);
  MinimalEchoClient callback(at.callback), queue(at.queue);
  const PayloadBytes bytes = BytesOf(p, Direction::kForward);
  const int64_t reply = p.OutputElements() * static_cast<int64_t>(sizeof(float));
  std::vector<Way> ways;
  ways.push_back({"engine alone", [&] { sends.CallEngine(); }});
  ways.push_back(
      {"minimal echo, callback", [&] { callback.Call(bytes.input, reply); }, at.callback_process});
  ways.push_back(
      {"minimal echo, one thread", [&] { queue.Call(bytes.input, reply); }, at.queue_process});
  ways.push_back({"attnd", [&] { sends.CallDaemon(); }, at.attnd_process});
  if (shares) {
    ways.push_back({"attnd, shared memory", [&] { shared.CallDaemon(); }, at.attnd_process});
  }
  Compare(title, ways);
}

// A function of its own, so that a profiler can begin and end with it.
__attribute__((noinline)) void CountedCalls(Way& way, int count) {
  for (int n = 0; n < count; ++n) way.TimedCall();
}

void MakeCalls(absl::string_view what, const std::string& address, int count) {
  const Problem p = OneHead(4, 1, 256);
  Way way;
  std::optional<Caller> caller;
  std::optional<MinimalEchoClient> echo;
  if (what == "echo") {
    echo.emplace(address);
    way.call = [&, bytes = BytesOf(p, Direction::kForward).input,
                reply = p.OutputElements() * int64_t{sizeof(float)}] { echo->Call(bytes, reply); };
  } else {
    caller.emplace(p, address, false);
    way.call = [&] { caller->CallDaemon(); };
  }
  for (int n = 0; n < kCallsATurn; ++n) way.call();  // connects, and warms up
  const double before = OwnThreadMicroseconds();
  CountedCalls(way, count);
  const double own = (OwnThreadMicroseconds() - before) / count;
  std::sort(way.microseconds.begin(), way.microseconds.end());
  std::printf("%d calls: p50 %.1f p90 %.1f p99 %.1f us, caller CPU %.1f us\n", count, way.At(0.5),
              way.At(0.9), way.At(0.99), own);
}

int Main(int argc, char** argv) {
  if (argc == 4 && absl::string_view(argv[1]) == "echo") {
    bool queue = absl::string_view(argv[2]) == "queue";
    ServeMinimalEcho(argv[3], queue ? EchoServer::kQueue : EchoServer::kCallback);
    return 0;
  }
  int count = 0;
  if (argc == 5 && absl::string_view(argv[1]) == "calls" && absl::SimpleAtoi(argv[4], &count)) {
    MakeCalls(argv[2], argv[3], count);
    return 0;
  }
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s path/to/attnd [flag of attnd]...\n", argv[0]);
    return 2;
  }
  const std::vector<std::string> flags(argv + 2, argv + argc);
  for (bool unix_socket : {false, true}) {
    auto address = [&](int n) {
      return unix_socket ? absl::StrCat("unix:/tmp/wire_latency.", getpid(), ".", n)
                         : absl::StrCat("127.0.0.1:", kFirstPort + n);
    };
    std::vector<std::string> attnd = {
        argv[1], "--listen",      address(0), "--metrics_listen", "127.0.0.1:0", "--log_level",
        "error", "--drain_delay", "0"};
    attnd.insert(attnd.end(), flags.begin(), flags.end());
    ServerProcess daemon(attnd), callback({"/proc/self/exe", "echo", "callback", address(1)}),
        queue({"/proc/self/exe", "echo", "queue", address(2)});
    Servers servers{address(0), address(1), address(2), &daemon, &callback, &queue};
    const std::string over = unix_socket ? "unix socket" : "TCP";
    Measure(absl::StrCat("4 KiB, ", over), OneHead(4, 1, 256), servers, false);
    Measure(absl::StrCat("N = 128, ", over), OneHead(128, 128, 64), servers, unix_socket);
  }
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
