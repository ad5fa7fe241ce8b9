// The daemon's binary as a child process, for tests of signals, restarts and several daemons. A
// test that uses it has //server:attnd among its data.
#pragma once

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "client/cli/metrics_text.h"
#include "proto/attnd/v1/attention.grpc.pb.h"

extern "C" char** environ;

namespace attnd {

// A child process whose stderr and stdout go to files.
class Child {
 public:
  explicit Child(const std::vector<std::string>& flags) {
    out_ = absl::StrCat(testing::TempDir(), "/attnd_out_", getpid(), "_", counter_++);
    std::vector<std::string> words = {"server/attnd"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    CHECK(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Child() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    Wait();
  }
  void Signal(int signal) { kill(pid_, signal); }
  // Its exit code; −1 when a signal ended it.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string Output() const {
    std::ifstream file(out_);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  static inline int counter_ = 0;
  pid_t pid_ = 0;
  std::string out_;
};

inline std::string TempPath(const std::string& name) {
  return absl::StrCat(testing::TempDir(), "/", name, "_", getpid());
}

// Waits for a port file and reads its first line.
inline std::string WaitForPort(const std::string& path) {
  while (true) {
    std::ifstream file(path);
    std::string port;
    if (file >> port) return port;
    std::this_thread::yield();
  }
}

// A daemon on free ports of `host`, once it serves.
struct RunningDaemon {
  RunningDaemon(const std::string& name, std::vector<std::string> flags,
                const std::string& host = "127.0.0.1")
      : port_file(TempPath(name)), metrics_port_file(TempPath(name + "_metrics")) {
    flags.insert(flags.end(),
                 {"--listen", host + ":0", "--port_file", port_file, "--metrics_listen",
                  "127.0.0.1:0", "--metrics_port_file", metrics_port_file});
    child = std::make_unique<Child>(flags);
    port = WaitForPort(port_file);
    address = absl::StrCat(host, ":", port);
  }
  std::unique_ptr<v1::Attention::Stub> Stub() const {
    return v1::Attention::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  }
  std::string MetricsUrl() const {
    return absl::StrCat("http://127.0.0.1:", WaitForPort(metrics_port_file), "/metrics");
  }
  // The sum of the samples with this name and these labels.
  double Metric(absl::string_view name, const Labels& labels) const {
    auto text = FetchMetrics(MetricsUrl(), absl::Seconds(10));
    CHECK(text.ok()) << text.status();
    auto metrics = MetricsText::Parse(*text);
    CHECK(metrics.ok()) << metrics.status();
    return metrics->Sum(name, labels);
  }
  std::string port_file, metrics_port_file, port, address;
  std::unique_ptr<Child> child;
};

}  // namespace attnd
