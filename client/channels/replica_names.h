// Names that stand for several replicas: which addresses they have now, so that the client picks
// among them as among addresses that were listed.
//
//     dns:///host:port   the addresses of a host          srv:name    the targets of an SRV record
//     dir:path           a folder, of whose files each    file:path   a file with an address a line
//                        holds an address
//
// Threads: any.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

struct ReplicaName {
  enum class Kind { kDns, kSrv, kDirectory, kFile };
  std::string host, port;  // host: of kSrv the name, of files the path
  Kind kind = Kind::kDns;

  // How long what was found is taken for true.
  absl::Duration look_up_every() const {
    const bool is_here = kind == Kind::kDirectory || kind == Kind::kFile;
    return is_here ? absl::Seconds(2) : absl::Seconds(30);
  }
};

// Nothing for other targets, and for a name server's own ("dns://8.8.8.8/host"), which gRPC asks.
std::optional<ReplicaName> ReplicaNameOf(absl::string_view target);

// gRPC targets of a name's addresses, "ipv4:1.2.3.4:7070" or "ipv6:[::1]:7070" or as a file has
// them, each once; none when it has none now. Of files, lines that are no address are left out: one
// may be half written.
using ReplicaLookup = std::function<std::vector<std::string>(const ReplicaName& name)>;

// By the system's resolver, and by reading files. May take seconds.
std::vector<std::string> LookUpReplicas(const ReplicaName& name);

// For a message to whoever has given the name, when nothing was found.
std::string WhyNoReplica(const ReplicaName& name);

}  // namespace attnd
