// What one caller notices of a crowd, hostile or merely large: 4 KiB calls, one at a time, while
//
//   headers    connections send blocks of headers that are far too large, and start again
//   resets     streams are begun and reset at once, some after their header
//   frames     connections send small frames that gRPC merely reads
//   messages   40 connections send messages of 15 MiB, 60 at once each, that never end
//   slow       1,000 connections send a call's bytes one by one
//   idle       10,000 connections do nothing
//
// Quiet pieces and those beside a crowd take turns, so that a machine that changes is seen; medians
// of the rounds. A round's crowd comes, connects, and is gone after it. Daemon and crowd are
// processes of their own, which send as fast as the daemon
// takes it: headers, frames and messages by a thread for each connection, else by one.
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
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "base/transport_tuning.h"
#include "client/attention_client.h"
#include "proto/attnd/v1/attention.pb.h"
#include "tests/raw_http2.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

constexpr char kAddress[] = "127.0.0.1:17090";
constexpr char kStream[] = "/attnd.v1.Attention/ForwardStream";
constexpr absl::Duration kQuiet = absl::Milliseconds(600), kBeside = absl::Milliseconds(1000),
                         kSettling = absl::Milliseconds(700), kPatience = absl::Seconds(3);
constexpr int kRounds = 5;

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

// All acknowledged.
Crowd Connect(int count) {
  Crowd crowd;
  for (int n = 0; n < count; ++n) {
    crowd.push_back(std::make_unique<RawHttp2>(kAddress));
    crowd.back()->Greet();
  }
  for (auto& peer : crowd) {
    while (!peer->acknowledged()) peer->Read(100);
  }
  return crowd;
}

// What a crowd calls when its connections are there, and the daemon knows what they are.
using Begun = std::function<void()>;

void SendHeaders() {
  const std::string block = RawHttp2::CallHeaders(kStream, RawHttp2::Headers(10000, {"x", "1"}));
  for (std::unique_ptr<RawHttp2> peer;;) {
    if (peer == nullptr || peer->ended() || peer->going_away()) {
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

void FloodHeaders(const Begun& begun) {
  begun();
  std::vector<std::thread> senders;
  for (int n = 0; n < 4; ++n) senders.emplace_back(SendHeaders);
  for (std::thread& sender : senders) sender.join();
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

void FloodResets(const Begun& begun) {
  begun();
  const std::string block = RawHttp2::CallHeaders(kStream), header = HeaderMessage();
  RawHttp2 peer(kAddress);
  peer.Greet();
  while (!peer.acknowledged()) peer.Read(100);
  for (uint32_t n = 0;; ++n) {
    peer.Send(RawHttp2::kHeaders, RawHttp2::kEndHeaders, 2 * n + 1, block);
    if (n % 2 == 1) peer.SendData(2 * n + 1, header);
    peer.Send(RawHttp2::kResetStream, 0, 2 * n + 1, std::string("\0\0\0\x08", 4));
  }
}

void SendFrames(RawHttp2::Frame type, uint8_t flags, uint32_t stream, std::string payload) {
  for (std::unique_ptr<RawHttp2> peer;;) {
    if (peer == nullptr || peer->ended() || peer->going_away()) {
      peer = std::make_unique<RawHttp2>(kAddress);
      peer->Greet();
      const bool begun = type == RawHttp2::kContinuation;
      peer->Send(RawHttp2::kHeaders, begun ? 0 : RawHttp2::kEndHeaders, 1,
                 RawHttp2::CallHeaders(kStream));
    }
    peer->Flood(1000, type, flags, stream, payload);
    peer->ReadWhatIsThere();
  }
}

void FloodFrames(const Begun& begun) {
  begun();
  std::vector<std::thread> senders;
  for (int n = 0; n < 2; ++n) {
    senders.emplace_back(SendFrames, RawHttp2::kWindowUpdate, 0, 0, std::string("\0\0\0\1", 4));
    senders.emplace_back(SendFrames, RawHttp2::kPing, RawHttp2::kAck, 0, "12345678");
    senders.emplace_back(SendFrames, RawHttp2::kSettings, RawHttp2::kAck, 0, "");
    senders.emplace_back(SendFrames, RawHttp2::kContinuation, 0, 1, "");
    senders.emplace_back(SendFrames, RawHttp2::kData, 0, 99, "x");
  }
  for (std::thread& sender : senders) sender.join();
}

void SendMessages() {
  constexpr uint32_t kStreams = 60;
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20), body(64 << 10, 'x');
  for (std::unique_ptr<RawHttp2> peer;;) {
    if (peer == nullptr || peer->ended()) {
      peer = std::make_unique<RawHttp2>(kAddress);
      peer->Greet();
      while (!peer->acknowledged() && !peer->ended()) peer->Read(100);
      for (uint32_t s = 0; s < kStreams; ++s) {
        peer->StartCall(2 * s + 1, kStream);
        peer->SendData(2 * s + 1, prefix);
      }
    }
    for (uint32_t s = 0; s < kStreams; ++s) peer->SendData(2 * s + 1, body);
    peer->Read(1);
  }
}

void FloodMessages(const Begun& begun) {
  begun();
  std::vector<std::thread> senders;
  for (int n = 0; n < 40; ++n) senders.emplace_back(SendMessages);
  for (std::thread& sender : senders) sender.join();
}

void SendSlowly(const Begun& begun) {
  const std::string chunk = RawHttp2::MessagePrefix(1000) + std::string(900, 'x');
  const std::string header = HeaderMessage();
  Crowd crowd = Connect(1000);
  for (auto& peer : crowd) {
    peer->StartCall(1, kStream);
    peer->SendData(1, header);
  }
  constexpr size_t kKnownAfter = 25;  // more than a daemon reads before it calls somebody slow
  for (size_t at = 0;; at = (at + 1) % chunk.size()) {
    if (at == kKnownAfter) begun();
    for (auto& peer : crowd) {
      if (!peer->ended()) peer->SendData(1, absl::string_view(chunk).substr(at, 1));
    }
    usleep(100'000);
  }
}

void StayIdle(const Begun& begun) {
  Crowd crowd = Connect(10000);
  begun();
  while (true) pause();
}

struct Latency {
  double p50 = 0, p90 = 0, p99 = 0;  // microseconds
  double failed = 0;                 // calls
};

Latency Measure(AttentionClient& client, absl::Duration time) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = p.kv_len = 1;
  p.q_len = 4;
  p.qk_head_dim = p.v_head_dim = 256;
  ProblemInputs in = RandomInputs(p, 1);
  AlignedBytes o(p.OutputElements() * 4);
  std::vector<double> times;
  double failed = 0;
  for (absl::Time end = absl::Now() + time; absl::Now() < end;) {
    absl::Time start = absl::Now();
    auto receipt = client.Forward(p, {.q = in.q.data(), .k = in.k.data(), .v = in.v.data()},
                                  {.o = o.data()}, {.timeout = kPatience});
    if (!receipt.ok()) ++failed;
    times.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  std::sort(times.begin(), times.end());
  auto at = [&](double quantile) {
    return times[static_cast<size_t>(quantile * static_cast<double>(times.size() - 1))];
  };
  return {at(0.5), at(0.9), at(0.99), failed};
}

Latency MedianOf(const std::vector<Latency>& rounds) {
  auto median = [&](auto of) {
    std::vector<double> values;
    for (const Latency& round : rounds) values.push_back(round.*of);
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  double failed = 0;
  for (const Latency& round : rounds) failed += round.failed;
  return {median(&Latency::p50), median(&Latency::p90), median(&Latency::p99), failed};
}

// A process that waits until it is told to begin.
struct Crowding {
  pid_t pid;
  int go, begun;  // pipes, a byte each

  explicit Crowding(void (*crowd)(const Begun&)) {
    int to[2], from[2];
    CHECK(pipe(to) == 0 && pipe(from) == 0);
    pid = Fork([&] {
      char byte;
      if (read(to[0], &byte, 1) == 1) crowd([&] { CHECK(write(from[1], "b", 1) == 1); });
    });
    close(to[0]);
    close(from[1]);  // so that its end is seen
    go = to[1];
    begun = from[0];
  }
  void Begin() const {
    char byte;
    CHECK(write(go, "g", 1) == 1 && read(begun, &byte, 1) == 1);
  }
};

// Quiet and beside a crowd, another in each round.
std::pair<Latency, Latency> Compare(AttentionClient& client, const std::vector<Crowding>& crowds) {
  std::vector<Latency> quiet, beside;
  for (const Crowding& crowd : crowds) {
    quiet.push_back(Measure(client, kQuiet));
    crowd.Begin();
    absl::SleepFor(kSettling);
    beside.push_back(Measure(client, kBeside));
    End(crowd.pid, SIGKILL);
    absl::SleepFor(kSettling);
  }
  return {MedianOf(quiet), MedianOf(beside)};
}

int Main(int argc, char** argv) {
  const bool has_only = argc > 2 && absl::string_view(argv[1]) == "--only";
  const absl::string_view only = has_only ? argv[2] : "";
  argc -= has_only ? 2 : 0;
  argv += has_only ? 2 : 0;
  if (argc < 2) {
    std::fprintf(
        stderr,
        "usage: flood_latency [--only PART_OF_A_NAME] path/to/null_attnd [flag of it]...\n");
    return 2;
  }
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = files.rlim_max;
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
  std::vector<char*> words = {argv[1]};
  for (const char* word : {"--listen", kAddress, "--metrics_listen", "127.0.0.1:0", "--log_level",
                           "error", "--max_connections", "12000", "--stream_idle_seconds", "60"}) {
    words.push_back(const_cast<char*>(word));
  }
  words.insert(words.end(), argv + 2, argv + argc);
  words.push_back(nullptr);
  pid_t daemon = Fork([&] { execv(words[0], words.data()); });
  struct {
    const char* name;
    void (*crowd)(const Begun&);
  } floods[] = {
      {"floods of headers", FloodHeaders},     {"streams reset as they begin", FloodResets},
      {"floods of small frames", FloodFrames}, {"messages that never end", FloodMessages},
      {"1,000 slow connections", SendSlowly},  {"10,000 idle connections", StayIdle}};
  std::vector<std::vector<Crowding>> crowds;
  // Children before this process has threads.
  for (auto& flood : floods) {
    std::vector<Crowding>& of_flood = crowds.emplace_back();
    for (int round = 0; round < kRounds; ++round) of_flood.emplace_back(flood.crowd);
  }
  auto client = *AttentionClient::Connect({.addresses = {kAddress}, .wait_for_ready = true});
  Measure(*client, absl::Seconds(2));
  std::printf(
      "4 KiB calls, microseconds, p50 / p90 / p99, medians of %d\n%-30s %26s %26s %8s failed\n",
      kRounds, "", "quiet", "beside it", "p99");
  for (size_t n = 0; n < crowds.size(); ++n) {
    if (!absl::StrContains(floods[n].name, only)) continue;
    const auto [quiet, beside] = Compare(*client, crowds[n]);
    std::printf("%-30s %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f %+7.0f %% %4.0f\n", floods[n].name,
                quiet.p50, quiet.p90, quiet.p99, beside.p50, beside.p90, beside.p99,
                100 * (beside.p99 / quiet.p99 - 1), quiet.failed + beside.failed);
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
