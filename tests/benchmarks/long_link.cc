// long_link: how much of an emulated link with a round trip the client and the daemon fill, both on
// this machine (tests/emulated_link.h; needs root). Prints a row for each rate and round trip.
//
//     long_link [--gbit 1,2] [--rtt_ms 0,20] [--channels 1,4,8] -- FLAGS OF attnd
//
// Calls that only bring: one key and o a 32nd of q, so that there is hardly any attention and the
// way up is what is filled. The link's share is payload over the rate; headers take 1 to 2 % of it.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/transport_tuning.h"
#include "client/cpp/attention_client.h"
#include "tests/call_outputs.h"
#include "tests/emulated_link.h"

extern "C" char** environ;

namespace attnd {
namespace {

constexpr char kPort[] = "7070";

pid_t Spawn(const std::string& binary, const std::string& host,
            const std::vector<std::string>& more) {
  std::vector<std::string> words = {binary,
                                    "--listen",
                                    absl::StrCat(host, ":", kPort),
                                    "--metrics_listen",
                                    "",
                                    "--insecure",
                                    "--log_level",
                                    "error"};
  words.insert(words.end(), more.begin(), more.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  CHECK(posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), environ) == 0) << binary;
  return pid;
}

Problem Upload(int64_t bytes) {
  Problem p;
  p.q_heads = p.kv_heads = p.kv_len = 1;
  p.qk_head_dim = 256;
  p.v_head_dim = 8;
  p.element = ElementType::kFloat16;
  p.batch = 16;
  p.q_len = bytes / 512 / p.batch;
  return p;
}

struct Setting {
  double gbit;
  int rtt_ms, channels;
};

// Payload bits a second on the way up.
double Measure(EmulatedLink& link, const Setting& setting) {
  link.Change(
      {.delay = absl::Milliseconds(setting.rtt_ms) / 2, .bits_per_second = setting.gbit * 1e9});
  auto client =
      AttentionClient::Connect({.addresses = {absl::StrCat(link.other_address(), ":", kPort)},
                                .channels_per_address = setting.channels,
                                .timeout = absl::Minutes(2),
                                .wait_for_ready = true,
                                .stream_above_bytes = 0});
  CHECK(client.ok()) << client.status();
  constexpr int kCallers = 3, kCalls = 4;  // others send while one waits for its answer
  Problem p = Upload(static_cast<int64_t>(setting.gbit * 1e9 / 8 / 4));  // of 0.25 s of the link
  ProblemInputs in = RandomInputs(p, 1);
  auto call = [&](int times) {
    Outputs out(p);
    for (int n = 0; n < times; ++n) {
      auto receipt = (*client)->Forward(p, ForwardInputs(in), {out.o.data()});
      CHECK(receipt.ok()) << receipt.status();
    }
  };
  call(2);  // connections, windows of TCP
  absl::Time begin = absl::Now();
  std::vector<std::thread> callers;
  for (int n = 0; n < kCallers; ++n) callers.emplace_back(call, kCalls);
  for (std::thread& caller : callers) caller.join();
  double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  return double(kCallers * kCalls) * double(p.QueryElements()) * 2 * 8 / seconds;
}

int Main(int argc, char** argv) {
  std::vector<double> gbits = {1, 2};
  std::vector<int> rtts = {0, 20}, channels = {4, 8};
  std::string binary = "bazel-bin/tests/benchmarks/null_attnd";
  std::vector<std::string> flags;
  CLI::App app("How much of a link with a round trip is filled", "long_link");
  app.add_option("--gbit", gbits, "rates of the link")->delimiter(',');
  app.add_option("--rtt_ms", rtts, "round trips")->delimiter(',');
  app.add_option("--channels", channels, "connections")->delimiter(',');
  app.add_option("--daemon", binary, "binary of the daemon");
  app.add_option("flags", flags, "flags of the daemon, after --");
  CLI11_PARSE(app, argc, argv);
  EmulatedLink link;
  pid_t daemon = 0;
  link.OnOtherHost([&] { daemon = Spawn(binary, link.other_address(), flags); });
  std::printf("%6s %7s %9s %9s %7s\n", "Gbit/s", "rtt ms", "channels", "payload", "share");
  for (double gbit : gbits) {
    for (int rtt : rtts) {
      for (int count : channels) {
        double rate = Measure(link, {gbit, rtt, count});
        std::printf("%6.1f %7d %9d %9.3f %6.1f%%\n", gbit, rtt, count, rate / 1e9,
                    rate / gbit / 1e7);
        std::fflush(stdout);
      }
    }
  }
  kill(daemon, SIGKILL);
  waitpid(daemon, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
