#include "client/channels/replica_names.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace attnd {

std::optional<ReplicaName> ReplicaNameOf(absl::string_view target) {
  if (!absl::ConsumePrefix(&target, "dns:")) return std::nullopt;
  if (absl::ConsumePrefix(&target, "//") && !absl::ConsumePrefix(&target, "/")) return std::nullopt;
  size_t colon = target.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return std::nullopt;
  return ReplicaName{std::string(target.substr(0, colon)), std::string(target.substr(colon + 1))};
}

std::vector<std::string> LookUpReplicas(const ReplicaName& name) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_ADDRCONFIG;
  if (getaddrinfo(name.host.c_str(), name.port.c_str(), &hints, &list) != 0) return {};
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::vector<std::string> targets;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(one->ai_addr, one->ai_addrlen, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      continue;
    }
    std::string target = one->ai_family == AF_INET6 ? absl::StrCat("ipv6:[", host, "]:", port)
                                                    : absl::StrCat("ipv4:", host, ":", port);
    if (std::find(targets.begin(), targets.end(), target) == targets.end()) {
      targets.push_back(std::move(target));
    }
  }
  return targets;
}

}  // namespace attnd
