#include "server/security/caller_label.h"

#include <gtest/gtest.h>

#include "server/security/auth.h"

namespace attnd {
namespace {

TEST(CallerLabel, IsTheNameOrTheKindOfAddress) {
  struct Case {
    const char *peer, *label;
  };
  const Case cases[] = {
      {"unix:", "unix"},
      {"ipv4:127.0.0.1:4711", "loopback"},
      {"ipv4:127.255.0.9:4711", "loopback"},
      {"ipv6:%5B::1%5D:4711", "loopback"},
      {"ipv6:[::ffff:127.0.0.1]:4711", "loopback"},
      {"ipv4:10.1.2.3:1", "private"},
      {"ipv4:172.31.0.1:1", "private"},
      {"ipv4:172.32.0.1:1", "public"},
      {"ipv4:192.168.7.7:1", "private"},
      {"ipv4:100.64.0.1:1", "private"},
      {"ipv6:%5Bfd00::7%5D:1", "private"},
      {"ipv6:%5Bfe80::1%25eth0%5D:1", "private"},
      {"ipv4:8.8.8.8:1", "public"},
      {"ipv6:%5B2001:db8::1%5D:1", "public"},
      {"something else", "public"},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(CallerLabel(CallerOfPeer(one.peer), one.peer), one.label) << one.peer;
    EXPECT_EQ(CallerLabel("alice", one.peer), "alice") << one.peer;
  }
}

}  // namespace
}  // namespace attnd
