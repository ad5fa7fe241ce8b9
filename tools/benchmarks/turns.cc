#include "tools/benchmarks/turns.h"

#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace attnd {

ServerProcess::ServerProcess(std::vector<std::string> words) : pid_(fork()) {
  if (pid_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  std::perror(argv[0]);
  _exit(1);
}

ServerProcess::~ServerProcess() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
}

ServerProcess::Use ServerProcess::UseSoFar() const {
  const std::string tasks = absl::StrCat("/proc/", pid_, "/task/");
  Use use;
  DIR* folder = opendir(tasks.c_str());
  CHECK(folder != nullptr) << tasks;
  while (const dirent* entry = readdir(folder)) {
    std::ifstream status(tasks + entry->d_name + "/status");
    for (std::string word; status >> word;) {
      double count = 0;
      if (word == "voluntary_ctxt_switches:" && status >> count) use.sleeps += count;
    }
    std::ifstream times(tasks + entry->d_name + "/schedstat");
    double nanoseconds = 0;
    if (times >> nanoseconds) use.cpu_us += nanoseconds / 1000;
  }
  closedir(folder);
  return use;
}

double OwnThreadMicroseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1000;
}

void Way::TimedCall() {
  absl::Time start = absl::Now();
  call();
  microseconds.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
}

void Way::Turn(bool counts) {
  ServerProcess::Use before;
  if (server != nullptr) before = server->UseSoFar();
  double own = OwnThreadMicroseconds();
  for (int n = 0; n < kCallsATurn; ++n) {
    counts ? TimedCall() : call();
  }
  if (!counts) return;
  caller_us += OwnThreadMicroseconds() - own;
  if (server == nullptr) return;
  ServerProcess::Use after = server->UseSoFar();
  server_us += after.cpu_us - before.cpu_us;
  sleeps += after.sleeps - before.sleeps;
}

double Way::At(double quantile) const {
  auto last = static_cast<double>(microseconds.size() - 1);
  return microseconds[static_cast<size_t>(quantile * last)];
}

void Compare(const std::string& title, std::vector<Way>& ways) {
  for (int round = -2; round < kRounds; ++round) {  // two rounds to warm up
    for (Way& way : ways) way.Turn(round >= 0);
  }
  std::printf("%-28s %8s %8s %8s %8s %10s %10s\n", title.c_str(), "p50", "p90", "p99", "sleeps",
              "caller CPU", "daemon CPU");
  for (Way& way : ways) {
    std::sort(way.microseconds.begin(), way.microseconds.end());
    double calls = kRounds * kCallsATurn;
    std::printf("%-28s %8.1f %8.1f %8.1f %8.1f %10.1f %10.1f\n", way.name.c_str(), way.At(0.5),
                way.At(0.9), way.At(0.99), way.sleeps / calls, way.caller_us / calls,
                way.server_us / calls);
  }
  std::fflush(stdout);
}

}  // namespace attnd
