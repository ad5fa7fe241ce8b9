// attnctl's `module plan` and `module list` against a daemon of two devices: where layers lie.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/shell.h"

namespace attnd {
namespace {

using Json = nlohmann::json;

std::string Attnctl(const Daemon& daemon, const std::string& arguments) {
  const Outcome ran = RunAttnctl(absl::StrCat("--address ", daemon.address(), " ", arguments));
  EXPECT_EQ(ran.exit_code, 0) << ran.output;
  return ran.output;
}

TEST(AttnctlModule, TellsWhereLayersLie) {
  std::vector<Device> devices;
  for (int n = 0; n < 2; ++n) devices.push_back(ReferenceDevice());
  ServerOptions options = TestOptions();
  options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
  Daemon daemon(std::move(devices), options);

  v1::RegisterModuleRequest request = SmallRegistration("cut");
  for (int n = 0; n < 2; ++n) request.mutable_layout()->mutable_layer(n)->set_device(1 - n);
  const std::string path = absl::StrCat(testing::TempDir(), "/request");
  std::ofstream(path, std::ios::binary) << request.SerializeAsString();
  const Json plan = Json::parse(Attnctl(daemon, absl::StrCat("-o json module plan ", path)));
  EXPECT_EQ(plan["devices"], (Json{"reference1", "reference0"}));
  EXPECT_EQ(plan["layer_device"], (Json{1, 0}));
  EXPECT_TRUE(absl::StrContains(Attnctl(daemon, absl::StrCat("module plan ", path)),
                                "engine reference on reference1+reference0, RECOMPUTE_NONE"));
  // With rows: its segments.
  const Json segments =
      Json::parse(Attnctl(daemon, absl::StrCat("-o json module plan ", path, " --rows 64")));
  EXPECT_EQ(segments["plans"][0]["rows"], 64);

  v1::RegisterModuleResponse registered;
  ModuleCaller caller(daemon.NewChannel());
  ASSERT_TRUE(caller.Register(request, registered).ok());
  const Json list = Json::parse(Attnctl(daemon, "-o json module list"));
  ASSERT_EQ(list.size(), 1);
  EXPECT_EQ(list[0]["devices"], (Json{"reference1", "reference0"}));
  EXPECT_TRUE(absl::StrContains(Attnctl(daemon, "module list"), "reference1+reference0"));
}

}  // namespace
}  // namespace attnd
