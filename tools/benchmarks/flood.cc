// flood: what one caller and attnd's memory notice of a hostile client, bare or behind a proxy. The
// caller makes 4 KiB calls, one at a time. Beside it, from another address of this host, come
//
//   headers    4 connections with blocks of headers that are far too large
//   resets     4 connections whose streams are reset as they begin, some after a message
//   frames     10 connections with pings, settings, window updates and empty or stray frames
//   messages   20 connections with messages of 15 MiB that never end
//   slow       100 connections that send a call's bytes one by one
//   masks      100 calls a second, each with another mask: too complex, or a second of work
//
// A connection that ends is made again. Quiet pieces and those beside a flood take turns; medians
// of the rounds. Resident memory is the largest sample of all daemons together.
//
//     flood --address 127.0.0.1:7070 --metrics http://127.0.0.1:9464/metrics
//     flood --address localhost:7443 --tls-ca ca.pem --tls-cert c.crt --tls-key c.key --metrics ...
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "client/cli/metrics_text.h"
#include "net/process_tuning.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/problem_codec.h"
#include "tests/fixtures/raw_http2.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr char kStream[] = "/attnd.v1.Attention/ForwardStream";
constexpr absl::Duration kSettling = absl::Milliseconds(700), kPatience = absl::Seconds(5);

struct Flags {
  std::string address = "127.0.0.1:7070", from = "127.0.0.2", only;
  std::vector<std::string> metrics;
  ClientTlsOptions tls;
  int rounds = 5;
  double seconds = 1;
};

// Where the flood goes.
class Target {
 public:
  explicit Target(const Flags& flags) : address_(flags.address), from_(flags.from) {
    if (flags.tls.ca_file.empty()) return;
    tls_ = SSL_CTX_new(TLS_client_method());
    static constexpr uint8_t kHttp2[] = {2, 'h', '2'};
    CHECK(SSL_CTX_set_alpn_protos(tls_, kHttp2, sizeof(kHttp2)) == 0);
    CHECK(SSL_CTX_use_certificate_chain_file(tls_, flags.tls.certificate_file.c_str()) == 1);
    CHECK(SSL_CTX_use_PrivateKey_file(tls_, flags.tls.key_file.c_str(), SSL_FILETYPE_PEM) == 1);
  }
  // Greeted and, if it was taken, acknowledged.
  std::unique_ptr<RawHttp2> Connect() const {
    auto peer = std::make_unique<RawHttp2>(address_, tls_, from_);
    peer->Greet();
    while (!peer->acknowledged() && !peer->ended()) peer->Read(100);
    if (peer->ended()) usleep(20'000);
    return peer;
  }

 private:
  const std::string address_, from_;
  SSL_CTX* tls_ = nullptr;  // as long as the process
};

bool Over(const RawHttp2& peer) { return peer.ended() || peer.going_away(); }

void SendHeaders(const Target& target) {
  const std::string block = RawHttp2::CallHeaders(kStream, RawHttp2::Headers(10000, {"x", "1"}));
  while (true) {
    auto peer = target.Connect();
    for (uint32_t stream = 1; !Over(*peer); stream += 2) {
      peer->Send(RawHttp2::kHeaders, 0, stream, absl::string_view(block).substr(0, 16000));
      for (size_t at = 16000; at < block.size(); at += 16000) {
        bool last = at + 16000 >= block.size();
        peer->Send(RawHttp2::kContinuation, last ? RawHttp2::kEndHeaders : 0, stream,
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

void SendResets(const Target& target) {
  const std::string block = RawHttp2::CallHeaders(kStream), header = HeaderMessage();
  while (true) {
    auto peer = target.Connect();
    for (uint32_t n = 0; !Over(*peer); ++n) {
      peer->Send(RawHttp2::kHeaders, RawHttp2::kEndHeaders, 2 * n + 1, block);
      if (n % 2 == 1) peer->SendData(2 * n + 1, header);
      peer->Send(RawHttp2::kResetStream, 0, 2 * n + 1, std::string("\0\0\0\x08", 4));
      if (n % 100 == 0) peer->ReadWhatIsThere();
    }
  }
}

// A stream's first message. An odd `number`: refused by an estimate; else a second of work.
std::string MaskMessage(uint32_t number) {
  v1::ForwardStreamRequest message;
  v1::Problem& problem = *message.mutable_header()->mutable_problem();
  problem = EncodeProblem(SmallProblem(number % 2 == 1 ? 1 << 20 : 8192, 1));
  problem.mutable_mask()->set_version(1);
  auto& any = *problem.mutable_mask()->add_pattern()->mutable_expr()->mutable_any_of();
  for (uint32_t n = 0; n < 100; ++n) {
    v1::StrideRel& stride = *any.add_e()->mutable_stride_rel();
    stride.set_p(1009 + 2 * n);
    stride.set_phase(number % 1000);
  }
  problem.mutable_mask()->add_pattern_of(0);
  const std::string bytes = message.SerializeAsString();
  return RawHttp2::MessagePrefix(static_cast<uint32_t>(bytes.size())) + bytes;
}

void SendMasks(const Target& target) {
  const std::string block = RawHttp2::CallHeaders(kStream);
  for (uint32_t number = 0;;) {
    auto peer = target.Connect();
    for (uint32_t stream = 1; !Over(*peer); stream += 2) {
      peer->Send(RawHttp2::kHeaders, RawHttp2::kEndHeaders, stream, block);
      peer->SendData(stream, MaskMessage(number++));
      peer->ReadWhatIsThere();
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
}

struct Frames {
  RawHttp2::Frame type;
  uint8_t flags;
  uint32_t stream;
  std::string payload;
};

void SendFrames(const Target& target, const Frames& frames) {
  while (true) {
    auto peer = target.Connect();
    const bool begun = frames.type == RawHttp2::kContinuation;
    peer->Send(RawHttp2::kHeaders, begun ? 0 : RawHttp2::kEndHeaders, 1,
               RawHttp2::CallHeaders(kStream));
    while (!Over(*peer)) {
      peer->Flood(1000, frames.type, frames.flags, frames.stream, frames.payload);
      peer->ReadWhatIsThere();
    }
  }
}

void SendMessages(const Target& target) {
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20), body(64 << 10, 'x');
  while (true) {
    auto peer = target.Connect();
    auto most = peer->settings().find(3);  // MAX_CONCURRENT_STREAMS
    const uint32_t streams = most == peer->settings().end() ? 60 : std::min(most->second, 60u);
    for (uint32_t s = 0; s < streams; ++s) {
      peer->StartCall(2 * s + 1, kStream);
      peer->SendData(2 * s + 1, prefix);
    }
    while (!Over(*peer) && peer->resets() < static_cast<int>(streams)) {
      for (uint32_t s = 0; s < streams; ++s) peer->SendData(2 * s + 1, body);
      peer->Read(1);
    }
  }
}

void SendSlowly(const Target& target) {
  const std::string header = HeaderMessage(),
                    chunk = RawHttp2::MessagePrefix(1000) + std::string(900, 'x');
  while (true) {
    auto peer = target.Connect();
    peer->StartCall(1, kStream);
    peer->SendData(1, header);
    for (size_t at = 0; !Over(*peer) && !peer->is_over(1); at = (at + 1) % chunk.size()) {
      peer->SendData(1, absl::string_view(chunk).substr(at, 1));
      usleep(100'000);
    }
  }
}

using Senders = std::vector<std::thread>;

void Start(Senders& senders, int count, void (*send)(const Target&), const Target& target) {
  for (int n = 0; n < count; ++n) senders.emplace_back(send, std::cref(target));
}

void StartFrames(Senders& senders, const Target& target) {
  const Frames kinds[] = {{RawHttp2::kPing, 0, 0, "12345678"},
                          {RawHttp2::kSettings, 0, 0, ""},
                          {RawHttp2::kWindowUpdate, 0, 0, std::string("\0\0\0\1", 4)},
                          {RawHttp2::kContinuation, 0, 1, ""},
                          {RawHttp2::kData, 0, 99, "x"}};
  for (int n = 0; n < 2; ++n) {
    for (const Frames& frames : kinds) senders.emplace_back(SendFrames, std::cref(target), frames);
  }
}

struct Flood {
  const char* name;
  void (*start)(Senders&, const Target&);
};

const Flood kFloods[] = {
    {"headers", [](Senders& s, const Target& t) { Start(s, 4, SendHeaders, t); }},
    {"resets", [](Senders& s, const Target& t) { Start(s, 4, SendResets, t); }},
    {"frames", StartFrames},
    {"messages", [](Senders& s, const Target& t) { Start(s, 20, SendMessages, t); }},
    {"slow", [](Senders& s, const Target& t) { Start(s, 100, SendSlowly, t); }},
    {"masks", [](Senders& s, const Target& t) { Start(s, 1, SendMasks, t); }}};

// A process that floods from `Begin` on until `End`. Made before this process has threads.
class Flooder {
 public:
  Flooder(const Flood& flood, const Target& target) {
    int go[2];
    CHECK(pipe(go) == 0);
    pid_ = fork();
    if (pid_ != 0) {
      close(go[0]);
      go_ = go[1];
      return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char byte;
    if (read(go[0], &byte, 1) != 1) _exit(1);
    Senders senders;
    flood.start(senders, target);
    for (std::thread& sender : senders) sender.join();
  }
  void Begin() const { CHECK(write(go_, "g", 1) == 1); }
  void End() const {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(go_);
  }

 private:
  pid_t pid_;
  int go_;
};

struct Seen {
  double p50 = 0, p99 = 0;  // microseconds
  double calls = 0, failed = 0;
  double resident_mib = 0;  // the largest
};

double ResidentMib(const std::vector<std::string>& urls) {
  double bytes = 0;
  for (const std::string& url : urls) {
    auto text = FetchMetrics(url, absl::Seconds(5));
    CHECK(text.ok()) << text.status().message();
    bytes += MetricsText::Parse(*text)->Sum("process_resident_memory_bytes");
  }
  return bytes / (1 << 20);
}

Seen Measure(AttentionClient& client, const Flags& flags) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = p.kv_len = 1;
  p.q_len = 4;
  p.qk_head_dim = p.v_head_dim = 256;
  ProblemInputs in = RandomInputs(p, 1);
  AlignedBytes o(p.OutputElements() * 4);
  Seen seen;
  std::atomic<bool> over{false};
  std::thread sampler([&] {
    for (; !over; absl::SleepFor(absl::Milliseconds(100))) {
      seen.resident_mib = std::max(seen.resident_mib, ResidentMib(flags.metrics));
    }
  });
  std::vector<double> times;
  for (absl::Time end = absl::Now() + absl::Seconds(flags.seconds); absl::Now() < end;) {
    absl::Time start = absl::Now();
    auto receipt = client.Forward(p, {.q = in.q.data(), .k = in.k.data(), .v = in.v.data()},
                                  {.o = o.data()}, {.timeout = kPatience});
    if (!receipt.ok()) ++seen.failed;
    times.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  over = true;
  sampler.join();
  std::sort(times.begin(), times.end());
  auto at = [&](double quantile) {
    return times[static_cast<size_t>(quantile * static_cast<double>(times.size() - 1))];
  };
  seen.p50 = at(0.5);
  seen.p99 = at(0.99);
  seen.calls = static_cast<double>(times.size());
  return seen;
}

// Medians of latencies, sums of counts, the most of memory.
Seen Together(const std::vector<Seen>& rounds) {
  Seen all;
  auto median = [&](double Seen::*of) {
    std::vector<double> values;
    for (const Seen& round : rounds) values.push_back(round.*of);
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  for (const Seen& round : rounds) {
    all.calls += round.calls;
    all.failed += round.failed;
    all.resident_mib = std::max(all.resident_mib, round.resident_mib);
  }
  all.p50 = median(&Seen::p50);
  all.p99 = median(&Seen::p99);
  return all;
}

void Compare(AttentionClient& client, const Flags& flags, const char* name,
             const std::vector<Flooder>& flooders) {
  std::vector<Seen> quiet, beside;
  for (const Flooder& flooder : flooders) {
    quiet.push_back(Measure(client, flags));
    flooder.Begin();
    absl::SleepFor(kSettling);
    beside.push_back(Measure(client, flags));
    flooder.End();
    absl::SleepFor(kSettling);
  }
  const Seen before = Together(quiet), during = Together(beside);
  std::printf("%-10s %8.0f %8.0f %8.0f   %8.0f %8.0f %8.0f   %6.0f of %.0f\n", name, before.p50,
              before.p99, before.resident_mib, during.p50, during.p99, during.resident_mib,
              before.failed + during.failed, before.calls + during.calls);
  std::fflush(stdout);
}

int Run(const Flags& flags) {
  signal(SIGPIPE, SIG_IGN);
  const Target target(flags);
  std::vector<std::pair<const char*, std::vector<Flooder>>> floods;
  for (const Flood& flood : kFloods) {
    if (!absl::StrContains(flood.name, flags.only)) continue;
    std::vector<Flooder> flooders;
    for (int round = 0; round < flags.rounds; ++round) flooders.emplace_back(flood, target);
    floods.emplace_back(flood.name, std::move(flooders));
  }
  ClientOptions options{.addresses = {flags.address}, .wait_for_ready = true};
  if (!flags.tls.ca_file.empty()) options.tls = flags.tls;
  auto client = AttentionClient::Connect(options);
  CHECK(client.ok()) << client.status().message();
  Measure(**client, flags);
  std::printf("4 KiB calls, us; resident MiB\n%-10s %26s   %26s\n%-10s %8s %8s %8s   %8s %8s %8s\n",
              "", "quiet", "beside the flood", "", "p50", "p99", "memory", "p50", "p99", "memory");
  for (const auto& [name, flooders] : floods) Compare(**client, flags, name, flooders);
  return 0;
}

int Main(int argc, char** argv) {
  TuneForTransport();
  Flags flags;
  CLI::App app("flood: one caller's latency and attnd's memory beside a hostile client", "flood");
  app.add_option("--address", flags.address, "of attnd or of the proxy in front of it");
  app.add_option("--metrics", flags.metrics, "URLs of the daemons' metrics")->delimiter(',');
  app.add_option("--tls-ca", flags.tls.ca_file, "PEM");
  app.add_option("--tls-cert", flags.tls.certificate_file, "PEM, of caller and flood");
  app.add_option("--tls-key", flags.tls.key_file, "PEM");
  app.add_option("--from", flags.from, "address that the flood comes from");
  app.add_option("--only", flags.only, "part of a flood's name");
  app.add_option("--rounds", flags.rounds, "of each flood");
  app.add_option("--seconds", flags.seconds, "of each measurement");
  CLI11_PARSE(app, argc, argv);
  return Run(flags);
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
