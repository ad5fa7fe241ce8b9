// What the daemon's memory does while connections of 50 streams each send messages that are
// announced with 15 MiB and never end: as fast as the daemon takes them, or a few bytes a second.
// Who is cut off comes again. Resident MiB, twice a second; the daemon is a process of its own.
//
//     bazel build //tests/benchmarks:flood_memory //tests/benchmarks:null_attnd
//     cd bazel-bin/tests/benchmarks; ./flood_memory 20 ./null_attnd --receive_memory_mib 256
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "tests/raw_http2.h"

namespace attnd {
namespace {

constexpr char kAddress[] = "127.0.0.1:17091";
constexpr int kStreams = 50;
constexpr absl::Duration kLasts = absl::Seconds(6), kSample = absl::Milliseconds(500);

int64_t ResidentMib(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/statm"));
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return (resident * sysconf(_SC_PAGESIZE)) >> 20;
}

void WaitForDaemon() {
  while (true) {
    int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(17091);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bool there = connect(probe, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
    close(probe);
    if (there) return;
    absl::SleepFor(absl::Milliseconds(20));
  }
}

struct Sent {
  std::atomic<int64_t> bytes{0};
  std::atomic<int> streams_ended{0}, connections_ended{0};
};

std::unique_ptr<RawHttp2> Begin() {
  auto peer = std::make_unique<RawHttp2>(kAddress);
  peer->Greet();
  while (!peer->acknowledged() && !peer->ended()) peer->Read(100);
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20);
  for (uint32_t s = 0; s < kStreams; ++s) {
    peer->StartCall(2 * s + 1, "/attnd.v1.Attention/ForwardStream");
    peer->SendData(2 * s + 1, prefix);
  }
  return peer;
}

// One connection, and another when it has ended. `step`: of each stream in a round; `pause` after
// each.
void Send(size_t step, absl::Duration pause, absl::Time end, Sent& sent) {
  const std::string body(step, 'x');
  while (absl::Now() < end) {
    auto peer = Begin();
    while (absl::Now() < end && !peer->ended() && peer->resets() < kStreams) {
      for (uint32_t s = 0; s < kStreams && !peer->ended(); ++s) {
        sent.bytes += static_cast<int64_t>(peer->SendData(2 * s + 1, body));
      }
      peer->Read(1);
      absl::SleepFor(pause);
    }
    sent.streams_ended += peer->resets();
    if (peer->ended()) ++sent.connections_ended;
  }
}

void Flood(const char* name, size_t step, absl::Duration pause, pid_t daemon, int connections) {
  Sent sent;
  const absl::Time begin = absl::Now(), end = begin + kLasts;
  std::vector<std::thread> senders;
  for (int n = 0; n < connections; ++n) {
    senders.emplace_back([&] { Send(step, pause, end, sent); });
  }
  std::printf("%-8s", name);
  int64_t most = 0;
  for (absl::Time next = begin; absl::Now() < end; absl::SleepFor(absl::Milliseconds(10))) {
    const int64_t now = ResidentMib(daemon);
    most = std::max(most, now);
    if (absl::Now() < next) continue;
    next += kSample;
    std::printf(" %5d", static_cast<int>(now));
    std::fflush(stdout);
  }
  for (std::thread& sender : senders) sender.join();
  std::printf("   most %d MiB, %d MiB sent, %d streams and %d connections ended\n",
              static_cast<int>(most), static_cast<int>(sent.bytes >> 20), sent.streams_ended.load(),
              sent.connections_ended.load());
}

int Main(int argc, char** argv) {
  int connections = 0;
  if (argc < 3 || !absl::SimpleAtoi(argv[1], &connections)) {
    std::fprintf(stderr, "usage: %s connections path/to/null_attnd [flag of attnd]...\n", argv[0]);
    return 2;
  }
  ++argv;
  --argc;
  std::vector<char*> words = {argv[1]};
  for (const char* word : {"--listen", kAddress, "--metrics_listen", "", "--log_level", "error",
                           "--memory_limit_mib", "64", "--stream_idle_seconds", "60"}) {
    words.push_back(const_cast<char*>(word));
  }
  words.insert(words.end(), argv + 2, argv + argc);
  words.push_back(nullptr);
  pid_t daemon = fork();
  if (daemon == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv(words[0], words.data());
    _exit(1);
  }
  WaitForDaemon();
  std::printf("at rest %d MiB\n", static_cast<int>(ResidentMib(daemon)));
  Flood("slow", 16, absl::Milliseconds(200), daemon, connections);
  Flood("fast", 256 << 10, absl::ZeroDuration(), daemon, connections);
  Flood("again", 256 << 10, absl::ZeroDuration(), daemon, connections);
  kill(daemon, SIGTERM);
  waitpid(daemon, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
