#include "server/security/caller_label.h"

#include <arpa/inet.h>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "base/check.h"
#include "server/security/auth.h"

namespace attnd {
namespace {

struct Network {
  const char* name;
  const char* address;  // IPv4 as in ::ffff:0:0/96
  int bits;
};
constexpr Network kNetworks[] = {{"loopback", "::1", 128},
                                 {"loopback", "::ffff:127.0.0.0", 104},
                                 {"private", "::ffff:10.0.0.0", 104},
                                 {"private", "::ffff:172.16.0.0", 108},
                                 {"private", "::ffff:192.168.0.0", 112},
                                 {"private", "::ffff:169.254.0.0", 112},
                                 {"private", "::ffff:100.64.0.0", 106},
                                 {"private", "fc00::", 7},
                                 {"private", "fe80::", 10}};

bool IsIn(const in6_addr& address, const Network& network) {
  in6_addr base{};
  CHECK(inet_pton(AF_INET6, network.address, &base) == 1);
  for (int bit = 0; bit < network.bits; ++bit) {
    if (((address.s6_addr[bit / 8] ^ base.s6_addr[bit / 8]) >> (7 - bit % 8) & 1) != 0)
      return false;
  }
  return true;
}

}  // namespace

std::string CallerLabel(const std::string& caller, absl::string_view peer) {
  if (caller == "unix" || caller != CallerOfPeer(peer)) return caller;
  // gRPC writes "[::1]" as "%5B::1%5D", and a zone behind "%25".
  std::string text = absl::StrReplaceAll(caller, {{"%5B", ""}, {"%5D", ""}, {"[", ""}, {"]", ""}});
  text = text.substr(0, text.find('%'));
  if (!absl::StrContains(text, ':')) text = "::ffff:" + text;
  in6_addr address{};
  if (inet_pton(AF_INET6, text.c_str(), &address) != 1) return "public";
  for (const Network& network : kNetworks) {
    if (IsIn(address, network)) return network.name;
  }
  return "public";
}

}  // namespace attnd
