#include "client/channels/address.h"

#include <gtest/gtest.h>

#include <string>

namespace attnd {
namespace {

TEST(CheckAddress, TakesHostsWithPortsAndTargets) {
  for (const char* address : {"localhost:7070", "10.0.0.1:1", "[::1]:65535", "unix:/run/a.sock",
                              "unix:relative", "unix:///run/a.sock", "unix-abstract:name",
                              "dns:///gpu:7070", "ipv4:127.0.0.1:1,127.0.0.1:2", "ipv6:[::1]:1"}) {
    EXPECT_TRUE(CheckAddress(address).ok()) << address;
  }
}

TEST(CheckAddress, TakesAPathThatASocketsAddressHolds) {
  for (const std::string start : {"unix:/", "unix:///", "unix-abstract:n"}) {
    const std::string longest = start + std::string(106, 'x');
    EXPECT_TRUE(CheckAddress(longest).ok()) << longest;
    EXPECT_FALSE(CheckAddress(longest + "x").ok()) << longest;
  }
}

TEST(CheckAddress, RefusesWhatGrpcWouldTakeForSomethingElse) {
  for (const char* address : {"",
                              "localhost",
                              "localhost:",
                              ":7070",
                              "localhost:0",
                              "localhost:65536",
                              "localhost:-1",
                              "localhost: 7070",
                              "localhost:+7070",
                              "localhost:grpc",
                              "unix:",
                              "unix",
                              "unix://relative",
                              "unix://",
                              "http://127.0.0.1:7070",
                              "127.0.0.1:7070/",
                              "a b:1",
                              "a:1,b:2",
                              "ipv4:",
                              "ipv4:127.0.0.1",
                              "ipv4:127.0.0.1:1,",
                              "ipv6:[::1]",
                              "dns:"}) {
    EXPECT_FALSE(CheckAddress(address).ok()) << address;
  }
  EXPECT_EQ(
      CheckAddress("localhost").message(),
      "expected host:port, unix:path (at most 107 bytes) or a gRPC target, got \"localhost\"");
}

}  // namespace
}  // namespace attnd
