#include "client/cpp/address.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

TEST(CheckAddress, TakesHostsWithPortsAndTargets) {
  for (const char* address :
       {"localhost:7070", "10.0.0.1:1", "[::1]:65535", "unix:/run/a.sock", "unix:relative",
        "unix-abstract:name", "dns:///gpu:7070", "ipv4:127.0.0.1:1,127.0.0.1:2", "ipv6:[::1]:1"}) {
    EXPECT_TRUE(CheckAddress(address).ok()) << address;
  }
}

TEST(CheckAddress, RefusesWhatGrpcWouldTakeForSomethingElse) {
  for (const char* address :
       {"", "localhost", "localhost:", ":7070", "localhost:0", "localhost:65536", "localhost:-1",
        "localhost:grpc", "unix:", "unix", "http://127.0.0.1:7070", "127.0.0.1:7070/", "a b:1"}) {
    EXPECT_FALSE(CheckAddress(address).ok()) << address;
  }
  EXPECT_EQ(CheckAddress("localhost").message(),
            "expected host:port, unix:path or a gRPC target, got \"localhost\"");
}

}  // namespace
}  // namespace attnd
