#include "client/channels/proxy.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace attnd {
namespace {

class ProxyOfTest : public testing::Test {
 protected:
  ProxyOfTest() {
    for (const char* name : {"grpc_proxy", "https_proxy", "http_proxy"}) unsetenv(name);
  }
};

TEST_F(ProxyOfTest, IsNoneUnlessAskedFor) {
  setenv("http_proxy", "http://127.0.0.1:1", 1);
  EXPECT_EQ(ProxyOf("")->url, "");
  unsetenv("http_proxy");
  EXPECT_EQ(ProxyOf("environment")->url, "");
}

TEST_F(ProxyOfTest, TakesAnAddressAndHidesItsPassword) {
  auto proxy = ProxyOf("http://me:secret@proxy.example:3128/");
  ASSERT_TRUE(proxy.ok()) << proxy.status();
  EXPECT_EQ(proxy->url, "http://me:secret@proxy.example:3128/");
  EXPECT_EQ(proxy->shown, "http://proxy.example:3128");
}

TEST_F(ProxyOfTest, TakesTheFirstOfTheEnvironmentAndNamesIt) {
  setenv("http_proxy", "http://10.0.0.1:1", 1);
  EXPECT_EQ(ProxyOf("environment")->shown, "http://10.0.0.1:1 (http_proxy)");
  setenv("https_proxy", "http://10.0.0.2:2", 1);
  EXPECT_EQ(ProxyOf("environment")->url, "http://10.0.0.2:2");
  setenv("grpc_proxy", "", 1);
  EXPECT_EQ(ProxyOf("environment")->shown, "http://10.0.0.2:2 (https_proxy)");
}

TEST_F(ProxyOfTest, RefusesWhatGrpcWouldIgnore) {
  for (const char* option :
       {"proxy", "proxy:3128", "https://proxy:3128", "http://proxy", "http://", "http://a b:1"}) {
    auto proxy = ProxyOf(option);
    EXPECT_EQ(proxy.status().code(), absl::StatusCode::kInvalidArgument) << option;
  }
  setenv("https_proxy", "socks5://me:secret@proxy:1080", 1);
  EXPECT_EQ(ProxyOf("environment").status().message(),
            "proxy: expected http://host:port (https_proxy), got \"proxy:1080\"");
}

}  // namespace
}  // namespace attnd
