// long_link: how much of an emulated link with a round trip the client and the daemon fill, both on
// this machine (tests/fixtures/emulated_link.h; needs root). Prints a row for each rate and round
// trip.
//
//     long_link [--gbit 1,2] [--rtt_ms 0,20] [--loss 0,0.0001] [--channels 1,4,8] [--down]
//               -- FLAGS OF attnd
//
// Calls that only bring, or only fetch: one key and o a 32nd of q, or q of o, so that there is
// hardly any attention and one way is what is filled. The link's share is payload over the rate;
// headers take 1 to 2 % of it. Beside it, what as many plain sockets fill that do nothing but send.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "net/process_tuning.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/emulated_link.h"

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

Problem OneWay(int64_t bytes, bool down) {
  Problem p;
  p.q_heads = p.kv_heads = p.kv_len = 1;
  p.qk_head_dim = down ? 8 : 256;
  p.v_head_dim = down ? 256 : 8;
  p.element = ElementType::kFloat16;
  p.batch = 16;
  p.q_len = bytes / 512 / p.batch;
  return p;
}

struct Setting {
  double gbit;
  int rtt_ms;
  double loss;
  int channels;
  bool down;
};

// Reads what comes on a port of the other host.
class PlainReceiver {
 public:
  static constexpr int kPort = 7071;

  // On a thread of that host.
  explicit PlainReceiver(const char* address) {
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at = Address(address);
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0) << address;
    CHECK(listen(listener, 64) == 0);
    std::thread([this, listener] {
      for (int fd; (fd = accept(listener, nullptr, nullptr)) >= 0;) {
        std::thread([this, fd] { Read(fd); }).detach();
      }
    }).detach();
  }
  int64_t bytes() const { return bytes_; }

  static sockaddr_in Address(const char* text) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(kPort);
    CHECK(inet_pton(AF_INET, text, &address.sin_addr) == 1) << text;
    return address;
  }

 private:
  void Read(int fd) {
    std::vector<char> memory(1 << 20);
    for (ssize_t got; (got = recv(fd, memory.data(), memory.size(), 0)) > 0;) bytes_ += got;
    close(fd);
  }

  std::atomic<int64_t> bytes_{0};
};

// Payload bits a second that plain sockets bring.
double MeasurePlain(const char* there, const PlainReceiver& receiver, const Setting& setting) {
  const absl::Duration rtt = absl::Milliseconds(setting.rtt_ms);
  std::atomic<bool> over{false};
  std::vector<std::thread> senders;
  for (int n = 0; n < setting.channels; ++n) {
    senders.emplace_back([&] {
      int fd = socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in address = PlainReceiver::Address(there);
      CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) << there;
      std::vector<char> memory(1 << 20);
      while (!over && send(fd, memory.data(), memory.size(), MSG_NOSIGNAL) > 0) {
      }
      close(fd);
    });
  }
  absl::SleepFor(absl::Seconds(1) + 20 * rtt);  // windows of TCP
  const absl::Time begin = absl::Now();
  const int64_t before = receiver.bytes();
  absl::SleepFor(absl::Seconds(2));
  const double rate =
      double(receiver.bytes() - before) * 8 / absl::ToDoubleSeconds(absl::Now() - begin);
  over = true;
  for (std::thread& sender : senders) sender.join();
  return rate;
}

// Payload bits a second on the one way.
double Measure(const EmulatedLink& link, const Setting& setting) {
  auto client =
      AttentionClient::Connect({.addresses = {absl::StrCat(link.other_address(), ":", kPort)},
                                .channels_per_address = setting.channels,
                                .timeout = absl::Minutes(2),
                                .wait_for_ready = true,
                                .stream_above_bytes = 0});
  CHECK(client.ok()) << client.status();
  constexpr int kCallers = 3;  // others send while one waits for its answer
  const double call_bytes = std::min(setting.gbit * 1e9 / 8 / 4, double{64 << 20});
  const Problem p = OneWay(static_cast<int64_t>(call_bytes), setting.down);
  const ProblemInputs in = RandomInputs(p, 1);
  const double call_bits = double(p.batch * p.q_len) * 256 * 2 * 8;
  std::atomic<bool> over{false};
  std::atomic<double> done{0};  // bits of shards that have ended
  auto call = [&] {
    Outputs out(p);
    while (!over) {
      int64_t shards = 0;
      CallOptions options;
      options.progress = [&](const Progress& now) {
        done += call_bits * double(now.shards_done - shards) / double(now.shards_total);
        shards = now.shards_done;
      };
      auto receipt = (*client)->Forward(p, ForwardInputs(in), {out.o.data()}, options);
      CHECK(receipt.ok()) << receipt.status();
    }
  };
  std::vector<std::thread> callers;
  for (int n = 0; n < kCallers; ++n) callers.emplace_back(call);
  absl::SleepFor(absl::Seconds(1) + 60 * absl::Milliseconds(setting.rtt_ms));  // windows of TCP
  const absl::Time begin = absl::Now();
  const double before = done;
  absl::SleepFor(absl::Seconds(3));
  const double rate = (done - before) / absl::ToDoubleSeconds(absl::Now() - begin);
  over = true;
  for (std::thread& caller : callers) caller.join();
  return rate;
}

void PrintRow(EmulatedLink& link, const PlainReceiver& receiver, const Setting& setting) {
  link.Change({.delay = absl::Milliseconds(setting.rtt_ms) / 2,
               .bits_per_second = setting.gbit * 1e9,
               .loss = setting.loss});
  const double plain = MeasurePlain(link.other_address(), receiver, setting);
  const int64_t dropped = link.dropped();
  const double attnd = Measure(link, setting);
  std::printf("%6.1f %7d %8.4f %9d %9.3f %6.1f%% %9.3f %6.1f%% %8lld\n", setting.gbit,
              setting.rtt_ms, setting.loss * 100, setting.channels, plain / 1e9,
              plain / setting.gbit / 1e7, attnd / 1e9, attnd / setting.gbit / 1e7,
              static_cast<long long>(link.dropped() - dropped));
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  std::vector<double> gbits = {1, 2}, losses = {0};
  std::vector<int> rtts = {0, 20}, channels = {4, 8};
  std::string binary = "bazel-bin/tools/benchmarks/null_attnd";
  std::vector<std::string> flags;
  bool down = false;
  CLI::App app("How much of a link with a round trip is filled", "long_link");
  app.add_option("--gbit", gbits, "rates of the link")->delimiter(',')->allow_extra_args(false);
  app.add_option("--rtt_ms", rtts, "round trips")->delimiter(',')->allow_extra_args(false);
  app.add_option("--loss", losses, "probabilities that a packet is lost")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--channels", channels, "connections")->delimiter(',')->allow_extra_args(false);
  app.add_flag("--down", down, "fetch instead of bringing");
  app.add_option("--daemon", binary, "binary of the daemon");
  app.add_option("flags", flags, "flags of the daemon, after --");
  CLI11_PARSE(app, argc, argv);
  EmulatedLink link;
  pid_t daemon = 0;
  std::unique_ptr<PlainReceiver> receiver;
  link.OnOtherHost([&] {
    daemon = Spawn(binary, link.other_address(), flags);
    receiver = std::make_unique<PlainReceiver>(link.other_address());
  });
  std::printf("%6s %7s %8s %9s %17s %17s %8s\n", "Gbit/s", "rtt ms", "loss %", "channels",
              "plain sockets", "attnd", "dropped");
  for (double gbit : gbits) {
    for (int rtt : rtts) {
      for (double loss : losses) {
        for (int count : channels) PrintRow(link, *receiver, {gbit, rtt, loss, count, down});
      }
    }
  }
  kill(daemon, SIGKILL);
  waitpid(daemon, nullptr, 0);
  std::fflush(stdout);
  std::_Exit(0);  // the receiver's threads go on
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
