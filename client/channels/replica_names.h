// A name that stands for several replicas: "dns:///name:port" becomes the addresses that it has, so
// that the client picks among them as among addresses that were listed.
//
// Threads: any.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace attnd {

struct ReplicaName {
  std::string host, port;
};

// Of "dns:///host:port" or "dns:host:port"; nothing for other targets, and for a name server's own
// ("dns://8.8.8.8/host"), which gRPC asks.
std::optional<ReplicaName> ReplicaNameOf(absl::string_view target);

// gRPC targets of a name's addresses, "ipv4:1.2.3.4:7070" or "ipv6:[::1]:7070", each once, in
// order; none when it has none now.
using ReplicaLookup = std::function<std::vector<std::string>(const ReplicaName& name)>;

// By the system's resolver. May take seconds.
std::vector<std::string> LookUpReplicas(const ReplicaName& name);

}  // namespace attnd
