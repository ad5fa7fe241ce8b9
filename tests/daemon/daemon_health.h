// Whether a daemon in this process still serves, and what it occupies.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {

inline constexpr int64_t kMiB = int64_t{1} << 20;

inline grpc::Status CallSmall(v1::Attention::Stub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::ForwardResponse reply;
  return stub.Forward(&context, MakeForward(SmallProblem(), 1), &reply);
}

inline void ExpectHealthy(Daemon& daemon) {
  const grpc::Status status = CallSmall(daemon.stub());
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Waits until all memory of calls is given back; leases may stay.
inline void WaitUntilAllIsGivenBack(Daemon& daemon) {
  while (daemon.server().use().bytes != 0 || daemon.server().staging_used() != 0) {
    std::this_thread::yield();
  }
}

inline void ExpectRecovered(Daemon& daemon) {
  WaitUntilAllIsGivenBack(daemon);
  ExpectHealthy(daemon);
}

// The resident memory of this process.
inline int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

inline std::string ReasonOf(const grpc::Status& status) { return ErrorInfoOf(status).reason(); }

}  // namespace attnd
