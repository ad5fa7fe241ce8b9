// The C++ client's module calls whose tensors travel over several connections: they give the bytes
// that one connection gives, also where the daemon has no place for further streams.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/daemon/module_caller.h"
#include "tests/daemon/trained_module.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd {
namespace {

// 5 MB a tensor, not a whole number of chunks.
TrainedModule::Options Over(int channels) {
  return {.name = absl::StrCat("over", channels), .rows = 160001, .channels = channels};
}

ServerOptions WithRoomForLargeCalls() {
  ServerOptions options = WithMetrics();
  options.modules.memory = {int64_t{512} << 20, int64_t{512} << 20};
  return options;
}

class ClientModuleCarry : public ::testing::Test {
 protected:
  // Waits, since the daemon counts a call a moment after its caller has heard of its end.
  bool Reaches(double count, const Labels& labels) {
    const absl::Time until = absl::Now() + absl::Seconds(30);
    while (counts_.Of("attnd_module_calls_total", labels) < count && absl::Now() < until) {
      std::this_thread::yield();
    }
    return counts_.Of("attnd_module_calls_total", labels) >= count;
  }

  Daemon daemon_{ReferenceDevice(), WithRoomForLargeCalls()};
  const Counts counts_{daemon_};
};

TEST_F(ClientModuleCarry, GivesTheBytesThatOneConnectionGives) {
  TrainedModule one(daemon_.address(), Over(1));
  const auto expected = one.Compute();
  EXPECT_EQ(counts_.Of("attnd_module_calls_total", {{"method", "Carry"}}), 0);
  TrainedModule several(daemon_.address(), Over(8));
  EXPECT_TRUE(several.Compute() == expected);
  one.Step();
  several.Step();
  EXPECT_TRUE(several.Compute() == one.Compute());
  EXPECT_TRUE(Reaches(1, {{"method", "Carry"}, {"code", "OK"}}));
}

// Streams that wait for calls that do not come have all places that one caller may have.
TEST_F(ClientModuleCarry, DoesWithoutWhereThereIsNoPlace) {
  TrainedModule one(daemon_.address(), Over(1));
  const auto expected = one.Compute();
  TrainedModule several(daemon_.address(), Over(8));
  ModuleCaller other(daemon_.NewChannel());
  v1::RegisterModuleResponse registered;
  ASSERT_TRUE(other.Register(SmallRegistration("other"), registered).ok());
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<
      std::unique_ptr<grpc::ClientReaderWriter<v1::ModuleCarryRequest, v1::ModuleCarryResponse>>>
      streams;
  for (int n = 0; n < 16; ++n) {
    contexts.push_back(other.NewContext());
    streams.push_back(other.stub().Carry(contexts.back().get()));
    v1::ModuleCarryRequest request;
    request.mutable_header()->set_token(registered.token());
    request.mutable_header()->set_carry(absl::StrCat("none", n));
    ASSERT_TRUE(streams.back()->Write(request));
  }
  const Labels refused = {{"method", "Carry"}, {"code", "RESOURCE_EXHAUSTED"}};
  for (int n = 0; counts_.Of("attnd_module_calls_total", refused) == 0; ++n) {
    ASSERT_LT(n, 100);
    EXPECT_TRUE(several.Compute() == expected);
  }
  for (auto& context : contexts) context->TryCancel();
  for (auto& stream : streams) stream->Finish();
}

}  // namespace
}  // namespace attnd
