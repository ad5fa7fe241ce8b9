// The C++ client's module calls on the daemon's host: tensors in shared memory give the bytes that
// the socket gives, also once the daemon has been started anew and knows neither module nor memory.
#include <gtest/gtest.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "tests/daemon/trained_module.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/unique_name.h"

namespace attnd {
namespace {

constexpr uint32_t kManyRows = 4096;  // 128 KiB a tensor

ServerOptions ModulesOnThisHost() {
  ServerOptions options = WithMetrics();
  options.listen = {UniqueName("unix:/tmp/attnd_client_module_")};
  options.modules.memory = {int64_t{64} << 20, int64_t{64} << 20};
  return options;
}

TrainedModule::Options Sharing(int64_t bytes) {
  return {.name = absl::StrCat("m", bytes), .rows = kManyRows, .shared_bytes = bytes};
}

TEST(ClientModuleShared, GivesTheBytesThatTheSocketGives) {
  Daemon daemon(ReferenceDevice(), ModulesOnThisHost());
  const Counts counts(daemon);
  TrainedModule over_socket(daemon.address(), Sharing(0));
  const auto expected = over_socket.Compute();
  EXPECT_EQ(counts.Of("attnd_received_bytes_total", {{"transport", "memfd"}}), 0);
  TrainedModule shared(daemon.address(), Sharing(int64_t{256} << 20));
  EXPECT_TRUE(shared.Compute() == expected);
  EXPECT_EQ(counts.Of("attnd_received_bytes_total", {{"transport", "memfd"}}),
            2 * kManyRows * kModuleWidth * 4);
  EXPECT_EQ(counts.Of("attnd_sent_bytes_total", {{"transport", "memfd"}}),
            2 * kManyRows * kModuleWidth * 4);
}

// Less memory than one tensor takes: they travel.
TEST(ClientModuleShared, SendsTensorsWhereThereIsNoRoom) {
  Daemon daemon(ReferenceDevice(), ModulesOnThisHost());
  TrainedModule over_socket(daemon.address(), Sharing(0));
  TrainedModule shared(daemon.address(), Sharing(1 << 16));
  EXPECT_TRUE(shared.Compute() == over_socket.Compute());
}

TEST(ClientModuleShared, GoesOnWithADaemonThatWasStartedAnew) {
  const ServerOptions options = ModulesOnThisHost();
  auto daemon = std::make_unique<Daemon>(ReferenceDevice(), options);
  TrainedModule over_socket(options.listen[0], Sharing(0));
  over_socket.Compute();
  over_socket.Step();
  const auto expected = over_socket.Compute();

  TrainedModule shared(options.listen[0], Sharing(int64_t{256} << 20));
  shared.Compute();
  daemon.reset();
  daemon = std::make_unique<Daemon>(ReferenceDevice(), options);
  shared.Step();
  EXPECT_TRUE(shared.Compute() == expected);
}

}  // namespace
}  // namespace attnd
