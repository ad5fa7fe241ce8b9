// RpcServer: gRPC's side of the daemon: ports and unix sockets, TLS, limits of connections and
// messages, health, reflection, and the service.
//
//   our Listener accepts → ConnectionLimit → gRPC's external acceptor → AttentionService
//
// Threads: Start, the stops and the destructor by one; SetServing and the readings any.
#pragma once

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "net/connection_limit.h"
#include "net/listener.h"
#include "server/rpc/service.h"
#include "server/rpc/transport_options.h"
#include "server/rpc/unary_calls.h"
#include "server/security/certificate_watch.h"

namespace attnd {

class RpcServer {
 public:
  // `deps` and what they name outlive it. `certificates`: null for no TLS; unix sockets never have
  // any. `modules`: the service of that name; null: there is none. UNAVAILABLE when an address
  // cannot be had.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const std::vector<std::string>& listen,
                                                          const TransportOptions& transport,
                                                          const CertificateWatch* certificates,
                                                          const ServiceDeps& deps,
                                                          grpc::Service* modules);
  // Cancels what runs.
  ~RpcServer();

  // As bound: a port of 0 has become the real one. In the order of `listen`.
  const std::vector<std::string>& addresses() const { return addresses_; }
  int connections() { return connections_->open().all(); }
  // When a thread that takes small calls counts as stuck.
  absl::Time stuck_at() const { return unary_calls_->stuck_at(); }
  // Sets the health of a service of grpc.health.v1; "" is the server.
  void SetServing(const std::string& service, bool serving);
  // Closes the ports; what is connected stays.
  void StopAccepting();
  // Calls still open at `deadline` are cancelled. Returns when none is left.
  void Shutdown(absl::Time deadline);

 private:
  RpcServer(const TransportOptions& transport, const CertificateWatch* certificates,
            const ServiceDeps& deps, grpc::Service* modules);
  void LimitConnections();
  absl::Status Build(const std::vector<std::string>& listen);
  absl::Status AddAddress(const std::string& address, grpc::ServerBuilder& builder);
  std::shared_ptr<grpc::ServerCredentials> CredentialsFor(const std::string& address);

  // An address and gRPC's way in for its connections.
  struct Door {
    std::unique_ptr<Listener> listener;
    std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  };

  const TransportOptions transport_;
  const CertificateWatch* const certificate_files_;
  const ServiceDeps deps_;
  std::shared_ptr<ConnectionLimit> connections_;  // and the metrics, which read it
  AttentionService service_;
  grpc::Service* const modules_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> certificates_;
  std::unique_ptr<UnaryCalls> unary_calls_;  // ends after the server has shut down
  std::unique_ptr<grpc::Server> server_;
  std::vector<Door> doors_;  // closed before the server goes
  std::vector<std::string> addresses_;
};

}  // namespace attnd
