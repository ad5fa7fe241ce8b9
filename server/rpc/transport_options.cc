#include "server/rpc/transport_options.h"

#include "net/listen_address.h"

namespace attnd {

bool ProbesBandwidth(const TransportOptions& transport, const std::vector<std::string>& listen) {
  return transport.bdp_probe == "on" || (transport.bdp_probe == "auto" && ServesOtherHosts(listen));
}

}  // namespace attnd
