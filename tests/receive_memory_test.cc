// The memory of a daemon's requests while they arrive, under floods of messages that never end.
#include "base/receive_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "tests/daemon_fixture.h"
#include "tests/raw_http2.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

constexpr int64_t kMib = 1 << 20, kLimit = 64 * kMib;

ServerOptions Limited() {
  ServerOptions options = TestOptions();
  options.transport.receive_memory_bytes = kLimit;
  return options;
}

// 60 messages of 15 MiB on one connection, as fast as the daemon takes them.
void Flood(std::unique_ptr<RawHttp2> peer, std::atomic<int>& ended) {
  constexpr uint32_t kStreams = 60;
  peer->Greet();
  while (!peer->acknowledged()) peer->Read(100);
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20), body(64 << 10, 'x');
  for (uint32_t s = 0; s < kStreams; ++s) {
    peer->StartCall(2 * s + 1, "/attnd.v1.Attention/ForwardStream");
    peer->SendData(2 * s + 1, prefix);
  }
  while (!peer->ended()) {
    for (uint32_t s = 0; s < kStreams; ++s) peer->SendData(2 * s + 1, body);
    peer->Read(1);
  }
  ++ended;
}

grpc::Status Call(Daemon& daemon, const Problem& problem) {
  auto stub = daemon.NewStub();
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  return stub->Forward(&context, MakeForward(problem, 1), &reply);
}

// Its request is of 8 MiB.
Problem LargeProblem() {
  Problem problem = SmallProblem(8192, 1);
  problem.kv_len = 1;
  problem.qk_head_dim = problem.v_head_dim = 256;
  return problem;
}

TEST(ReceiveMemoryOfADaemon, StaysWithinItsLimitAndServesOthersBesideAFlood) {
  auto daemon = std::make_unique<Daemon>(MakeCpuBackend({}), Limited());
  ReceiveMemory& memory = daemon->server().receive_memory();
  constexpr int kPeers = 8;
  std::atomic<int> ended{0};
  std::vector<std::thread> senders;
  for (int n = 0; n < kPeers; ++n) {
    senders.emplace_back(Flood, std::make_unique<RawHttp2>(daemon->address()), std::ref(ended));
  }
  while (memory.waiting() == 0) std::this_thread::yield();
  int64_t most = 0;
  for (int n = 0; ended < kPeers; ++n) {
    const grpc::Status status = Call(*daemon, n % 4 == 0 ? LargeProblem() : SmallProblem());
    EXPECT_TRUE(status.ok()) << status.error_message();
    most = std::max(most, memory.used());
  }
  EXPECT_GE(most, kLimit / 2);
  EXPECT_LE(most, kLimit);
  EXPECT_EQ(memory.resets(), kPeers);
  daemon.reset();
  for (std::thread& sender : senders) sender.join();
}

}  // namespace
}  // namespace attnd
