// The C++ client's calls beyond what one caller may have open at a daemon: they wait for others of
// the caller's, until their deadline.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "client/attention_client.h"
#include "client/modules/module_client.h"
#include "client/types/error_detail.h"
#include "proto/attnd/v1/module.pb.h"
#include "tests/daemon/module_caller.h"
#include "tests/daemon/shut_peer.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd {
namespace {

class OverQuota : public ::testing::Test {
 protected:
  static ServerOptions Options() {
    ServerOptions options = WithMetrics();
    options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
    return options;
  }

  OverQuota() {
    auto made = ModuleClient(*client_).Register(SmallRegistration("m"));
    EXPECT_TRUE(made.ok()) << made.status();
    module_ = std::move(made->module);
    while (daemon_.server().call_bytes() > 0) std::this_thread::yield();  // it has ended there too
  }

  // Has calls of this host take all places that one caller may have, and keep them.
  std::unique_ptr<RawHttp2> TakeAllPlaces() {
    auto peer = Shut(daemon_);
    for (uint32_t n = 0; n < 40; ++n) {
      Ask(*peer, 2 * n + 1, "/attnd.v1.Modules/ListModules", "");
    }
    while (peer->answers() < 40) peer->Read(100);
    return peer;
  }
  double Refused() const {
    return counts_.Of("attnd_module_calls_total",
                      {{"method", "GetModule"}, {"code", "RESOURCE_EXHAUSTED"}});
  }

  Daemon daemon_{ReferenceDevice(), Options()};
  const Counts counts_{daemon_};
  std::unique_ptr<AttentionClient> client_ =
      *AttentionClient::Connect({.addresses = {daemon_.address()}, .shared_memory_bytes = 0});
  std::unique_ptr<RemoteModule> module_;
};

TEST_F(OverQuota, CallsOfModulesWaitForOthersOfTheirCaller) {
  auto peer = TakeAllPlaces();
  absl::Status done = absl::UnknownError("not yet");
  std::thread call([&] { done = module_->GetStatus({}).status(); });
  while (Refused() < 4) std::this_thread::yield();  // more often than other failures are tried
  peer.reset();
  call.join();
  EXPECT_TRUE(done.ok()) << done;
}

TEST_F(OverQuota, CallsOfModulesEndAtTheirDeadlineWithTheReason) {
  auto peer = TakeAllPlaces();
  const absl::Status done = module_->GetStatus({.timeout = absl::Milliseconds(250)}).status();
  ASSERT_TRUE(DetailOf(done).has_value()) << done;
  EXPECT_EQ(DetailOf(done)->reason, "TENANT_QUOTA");
  EXPECT_EQ(Refused(), 3);
}

}  // namespace
}  // namespace attnd
