// What a crowd can do to a daemon, hostile or merely large: ten thousand idle connections, a
// thousand slow streams, messages and headers that never end, streams that are reset as they begin.
// Memory stays bounded, and others are served.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon_fixture.h"
#include "tests/raw_http2.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

grpc::Status CallSmall(v1::Attention::Stub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::ForwardResponse reply;
  return stub.Forward(&context, MakeForward(SmallProblem(), 1), &reply);
}

void ExpectHealthy(Daemon& daemon) {
  grpc::Status status = CallSmall(daemon.stub());
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// As many descriptors as this process may have; how many sockets that allows beside a server's.
int SocketsToOpen(int wanted) {
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = files.rlim_max;
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
  return static_cast<int>(std::min<rlim_t>(static_cast<rlim_t>(wanted), files.rlim_max / 2));
}

TEST(DaemonFlood, HoldsIdleConnectionsToItsLimitAndTakesNewOnesWhenTheyGo) {
  ServerOptions options = TestOptions();
  options.transport.max_connections = 300;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  ExpectHealthy(daemon);  // its connection stands before the crowd comes
  std::vector<std::unique_ptr<RawHttp2>> crowd;
  for (int n = SocketsToOpen(10000); n > 0; --n) {
    crowd.push_back(std::make_unique<RawHttp2>(daemon.address()));
    crowd.back()->Greet();
  }
  // All but 299 are closed by the daemon.
  for (size_t left = crowd.size(); left > 299;) {
    left = 0;
    for (auto& connection : crowd) {
      connection->ReadWhatIsThere();
      if (!connection->ended()) ++left;
    }
    ASSERT_GE(left, 299u);
  }
  EXPECT_EQ(daemon.server().connections(), 300);
  ExpectHealthy(daemon);
  EXPECT_EQ(CallSmall(*daemon.NewStub()).error_code(), grpc::StatusCode::UNAVAILABLE);
  crowd.clear();
  while (daemon.server().connections() > 1) std::this_thread::yield();
  grpc::Status status = CallSmall(*daemon.NewStub());
  EXPECT_TRUE(status.ok()) << status.error_message();
}

}  // namespace
}  // namespace attnd
