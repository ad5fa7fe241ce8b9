// What the daemon's memory does while 1,000 streams send messages that are announced with 15 MiB
// and never end: as fast as the daemon takes them, or a few bytes a second. Resident MiB, twice a
// second; the daemon is a process of its own.
//
//     bazel build //tests/benchmarks:flood_memory //tests/benchmarks:null_attnd
//     cd bazel-bin/tests/benchmarks; ./flood_memory ./null_attnd --receive_memory_mib 256
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "tests/raw_http2.h"

namespace attnd {
namespace {

constexpr char kAddress[] = "127.0.0.1:17091";
constexpr int kConnections = 20, kStreams = 50;
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

using Crowd = std::vector<std::unique_ptr<RawHttp2>>;

Crowd Begin() {
  Crowd crowd;
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20);
  for (int n = 0; n < kConnections; ++n) {
    crowd.push_back(std::make_unique<RawHttp2>(kAddress));
    crowd.back()->Greet();
    while (!crowd.back()->acknowledged()) crowd.back()->Read(100);
    for (uint32_t s = 0; s < kStreams; ++s) {
      crowd.back()->StartCall(2 * s + 1, "/attnd.v1.Attention/ForwardStream");
      crowd.back()->SendData(2 * s + 1, prefix);
    }
  }
  return crowd;
}

int Resets(const Crowd& crowd) {
  int count = 0;
  for (const auto& peer : crowd) count += peer->resets();
  return count;
}

// `step`: of each stream in a round; `pause` after each.
void Flood(const char* name, size_t step, absl::Duration pause, pid_t daemon) {
  Crowd crowd = Begin();
  const std::string body(step, 'x');
  std::printf("%-8s", name);
  int64_t sent = 0, most = 0;
  absl::Time next = absl::Now();
  for (absl::Time end = absl::Now() + kLasts; absl::Now() < end;) {
    for (auto& peer : crowd) {
      for (uint32_t s = 0; s < kStreams && !peer->ended(); ++s) {
        sent += static_cast<int64_t>(peer->SendData(2 * s + 1, body));
      }
      int64_t now = ResidentMib(daemon);
      most = std::max(most, now);
      if (absl::Now() < next) continue;
      next = absl::Now() + kSample;
      std::printf(" %5d", static_cast<int>(now));
      std::fflush(stdout);
    }
    absl::SleepFor(pause);
  }
  std::printf("   most %d MiB, %d MiB sent, %d streams ended\n", static_cast<int>(most),
              static_cast<int>(sent >> 20), Resets(crowd));
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s path/to/null_attnd [flag of attnd]...\n", argv[0]);
    return 2;
  }
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
  Flood("slow", 16, absl::Milliseconds(200), daemon);
  Flood("fast", 256 << 10, absl::ZeroDuration(), daemon);
  Flood("again", 256 << 10, absl::ZeroDuration(), daemon);
  kill(daemon, SIGTERM);
  waitpid(daemon, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
