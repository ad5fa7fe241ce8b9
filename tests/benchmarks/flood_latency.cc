// What one caller notices of a crowd, hostile or merely large: 4 KiB calls, one at a time, while
//
//   headers    connections send blocks of headers that are far too large, and start again
//   resets     streams are begun and reset at once, some after their header
//   slow       1,000 connections send a call's bytes one by one
//   idle       10,000 connections do nothing
//
// The quiet daemon is measured before each, so that a machine that changes is seen. Daemon and
// crowd are processes of their own; each flood is one thread that sends as fast as the daemon takes
// it.
//
//     bazel build //tests/benchmarks:flood_latency //tests/benchmarks:null_attnd
//     bazel-bin/tests/benchmarks/flood_latency bazel-bin/tests/benchmarks/null_attnd
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "base/transport_tuning.h"
#include "client/cpp/attention_client.h"
#include "proto/attnd/v1/attention.pb.h"
#include "tests/raw_http2.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

constexpr char kAddress[] = "127.0.0.1:17090";
constexpr char kStream[] = "/attnd.v1.Attention/ForwardStream";
constexpr absl::Duration kMeasured = absl::Seconds(2), kSettling = absl::Milliseconds(700);

pid_t Fork(const std::function<void()>& child) {
  pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  child();
  _exit(1);
}

void End(pid_t pid, int signal) {
  kill(pid, signal);
  waitpid(pid, nullptr, 0);
}

using Crowd = std::vector<std::unique_ptr<RawHttp2>>;

Crowd Connect(int count) {
  Crowd crowd;
  for (int n = 0; n < count; ++n) {
    crowd.push_back(std::make_unique<RawHttp2>(kAddress));
    crowd.back()->Greet();
  }
  return crowd;
}

void FloodHeaders() {
  const std::string block = RawHttp2::CallHeaders(kStream, RawHttp2::Headers(10000, {"x", "1"}));
  Crowd crowd = Connect(4);
  while (true) {
    for (auto& peer : crowd) {
      if (peer->ended() || peer->going_away()) {
        peer = std::make_unique<RawHttp2>(kAddress);
        peer->Greet();
      }
      peer->Send(RawHttp2::kHeaders, 0, 1, absl::string_view(block).substr(0, 16000));
      for (size_t at = 16000; at < block.size(); at += 16000) {
        bool last = at + 16000 >= block.size();
        peer->Send(RawHttp2::kContinuation, last ? RawHttp2::kEndHeaders : 0, 1,
                   absl::string_view(block).substr(at, 16000));
      }
      peer->ReadWhatIsThere();
    }
  }
}

// A stream's first message.
std::string HeaderMessage() {
  v1::ForwardStreamRequest header;
  *header.mutable_header() = MakeForward(SmallProblem(128, 2), 1);
  for (std::string* tensor :
       {header.mutable_header()->mutable_q(), header.mutable_header()->mutable_k(),
        header.mutable_header()->mutable_v()}) {
    tensor->clear();
  }
  std::string bytes = header.SerializeAsString();
  return RawHttp2::MessagePrefix(static_cast<uint32_t>(bytes.size())) + bytes;
}

void FloodResets() {
  const std::string block = RawHttp2::CallHeaders(kStream), header = HeaderMessage();
  RawHttp2 peer(kAddress);
  peer.Greet();
  for (uint32_t n = 0;; ++n) {
    peer.Send(RawHttp2::kHeaders, RawHttp2::kEndHeaders, 2 * n + 1, block);
    if (n % 2 == 1) peer.SendData(2 * n + 1, header);
    peer.Send(RawHttp2::kResetStream, 0, 2 * n + 1, std::string("\0\0\0\x08", 4));
  }
}

void SendSlowly() {
  const std::string chunk = RawHttp2::MessagePrefix(1000) + std::string(900, 'x');
  const std::string header = HeaderMessage();
  Crowd crowd = Connect(1000);
  for (auto& peer : crowd) {
    peer->StartCall(1, kStream);
    peer->SendData(1, header);
  }
  for (size_t at = 0;; at = (at + 1) % chunk.size()) {
    for (auto& peer : crowd) {
      if (!peer->ended()) peer->SendData(1, absl::string_view(chunk).substr(at, 1));
    }
    usleep(100'000);
  }
}

void StayIdle() {
  Crowd crowd = Connect(10000);
  while (true) pause();
}

struct Latency {
  double p50 = 0, p90 = 0, p99 = 0;  // microseconds
};

Latency Measure(AttentionClient& client) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = p.kv_len = 1;
  p.q_len = 4;
  p.qk_head_dim = p.v_head_dim = 256;
  ProblemInputs in = RandomInputs(p, 1);
  AlignedBytes o(p.OutputElements() * 4);
  std::vector<double> times;
  for (absl::Time end = absl::Now() + kMeasured; absl::Now() < end;) {
    absl::Time start = absl::Now();
    auto receipt =
        client.Forward(p, {.q = in.q.data(), .k = in.k.data(), .v = in.v.data()}, {.o = o.data()});
    CHECK(receipt.ok()) << receipt.status().ToString();
    times.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  std::sort(times.begin(), times.end());
  auto at = [&](double quantile) {
    return times[static_cast<size_t>(quantile * static_cast<double>(times.size() - 1))];
  };
  return {at(0.5), at(0.9), at(0.99)};
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s path/to/null_attnd [flag of attnd]...\n", argv[0]);
    return 2;
  }
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = files.rlim_max;
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
  std::vector<char*> words = {argv[1]};
  for (const char* word : {"--listen", kAddress, "--metrics_listen", "127.0.0.1:0", "--log_level",
                           "error", "--max_connections", "12000", "--stream_idle_seconds", "60",
                           "--stream_min_kib_per_second", "0"}) {
    words.push_back(const_cast<char*>(word));
  }
  words.insert(words.end(), argv + 2, argv + argc);
  words.push_back(nullptr);
  pid_t daemon = Fork([&] { execv(words[0], words.data()); });
  struct {
    const char* name;
    void (*crowd)();
  } floods[] = {{"floods of headers", FloodHeaders},
                {"streams reset as they begin", FloodResets},
                {"1,000 slow connections", SendSlowly},
                {"10,000 idle connections", StayIdle}};
  std::vector<std::pair<pid_t, int>> crowds;
  // Children before this process has threads.
  for (auto& flood : floods) {
    int go[2];
    CHECK(pipe(go) == 0);
    pid_t pid = Fork([&] {
      char byte;
      if (read(go[0], &byte, 1) == 1) flood.crowd();
    });
    crowds.emplace_back(pid, go[1]);
  }
  auto client = *AttentionClient::Connect({.addresses = {kAddress}, .wait_for_ready = true});
  Measure(*client);
  std::printf("4 KiB calls, microseconds, p50 / p90 / p99\n%-30s %26s %26s %8s\n", "", "before",
              "beside it", "p99");
  for (size_t n = 0; n < crowds.size(); ++n) {
    Latency before = Measure(*client);
    CHECK(write(crowds[n].second, "g", 1) == 1);
    absl::SleepFor(kSettling);
    Latency beside = Measure(*client);
    End(crowds[n].first, SIGKILL);
    absl::SleepFor(kSettling);
    std::printf("%-30s %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f %+7.0f %%\n", floods[n].name, before.p50,
                before.p90, before.p99, beside.p50, beside.p90, beside.p99,
                100 * (beside.p99 / before.p99 - 1));
    std::fflush(stdout);
  }
  End(daemon, SIGTERM);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
