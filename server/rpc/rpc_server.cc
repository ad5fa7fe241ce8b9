#include "server/rpc/rpc_server.h"

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "net/congestion_control.h"
#include "net/listen_address.h"
#include "net/unix_socket_buffer.h"

namespace attnd {
namespace {

using grpc::experimental::ExternalConnectionAcceptor;

// gRPC's own look at the copies of certificates that CertificateWatch makes.
constexpr unsigned kCopiesRefreshSeconds = 1;

// gRPC's own services are synchronous and use these threads: each open stream of reflection keeps
// one. Further calls of these services are answered RESOURCE_EXHAUSTED. Ours have their own
// threads.
constexpr int kSynchronousThreads = 32;

// gRPC's reflection is in every server of a program that links it.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins,
                  [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; });
  }
};

void SetMessages(const TransportOptions& transport, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(transport.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);  // admission has checked unary replies
  // Compressed requests are refused: 16-bit tensors do not shrink, and a bomb would.
  builder.SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  grpc::ResourceQuota quota("attnd");
  quota.Resize(static_cast<size_t>(transport.receive_memory_bytes));
  quota.SetMaxThreads(kSynchronousThreads);
  builder.SetResourceQuota(quota);
}

void SetConnections(const TransportOptions& transport, bool probe_bandwidth,
                    grpc::ServerBuilder& builder) {
  auto number = [&](const char* name, int64_t value) {
    builder.AddChannelArgument(name, static_cast<int>(value));
  };
  auto time = [&](const char* name, absl::Duration value) {
    number(name, absl::ToInt64Milliseconds(value));
  };
  number(GRPC_ARG_HTTP2_BDP_PROBE, probe_bandwidth ? 1 : 0);
  number(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, transport.stream_window_bytes);
  number(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, transport.max_frame_bytes);
  number(GRPC_ARG_MAX_CONCURRENT_STREAMS, transport.max_concurrent_streams);
  number(GRPC_ARG_MAX_METADATA_SIZE, transport.max_metadata_bytes);
  time(GRPC_ARG_MAX_CONNECTION_AGE_MS, transport.max_connection_age);
  time(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, transport.max_connection_age_grace);
  time(GRPC_ARG_MAX_CONNECTION_IDLE_MS, transport.max_connection_idle);
  time(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, transport.handshake_timeout);
  time(GRPC_ARG_KEEPALIVE_TIME_MS, transport.keepalive_time);
  time(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, transport.keepalive_timeout);
  time(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, transport.min_ping_interval);
}

// Small calls want a free thread more than they want many.
int UnaryThreads() { return std::clamp(AvailableCpus() / 4, 1, 2); }

void HandOver(int socket, ConnectionLimit& limit, ExternalConnectionAcceptor& grpc) {
  if (!limit.Take(socket)) {
    close(socket);
    return;
  }
  if (StaysOnThisHost(socket)) SetCongestionControl(socket, kLoopbackCongestion);
  WidenIfUnixSocket(socket);
  ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.fd = socket;
  grpc.HandleNewConnection(&connection);
}

// "127.0.0.1:0" with the port that was bound.
std::string BoundAddress(const std::string& asked, int port) {
  if (IsUnixAddress(asked)) return asked;
  return absl::StrCat(asked.substr(0, asked.rfind(':')), ":", port);
}

}  // namespace

RpcServer::RpcServer(const TransportOptions& transport, const CertificateWatch* certificates,
                     const ServiceDeps& deps, grpc::Service* modules)
    : transport_(transport),
      certificate_files_(certificates),
      deps_(deps),
      service_(deps_),
      modules_(modules) {}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const std::vector<std::string>& listen,
                                                            const TransportOptions& transport,
                                                            const CertificateWatch* certificates,
                                                            const ServiceDeps& deps,
                                                            grpc::Service* modules) {
  std::unique_ptr<RpcServer> server(new RpcServer(transport, certificates, deps, modules));
  server->LimitConnections();
  RETURN_IF_ERROR(server->Build(listen));
  server->unary_calls_->Start();
  for (Door& door : server->doors_) {
    door.listener->Start([limit = server->connections_, acceptor = door.acceptor](int socket) {
      HandOver(socket, *limit, *acceptor);
    });
  }
  return server;
}

RpcServer::~RpcServer() {
  StopAccepting();
  if (server_ != nullptr) Shutdown(SteadyNow());
  unary_calls_.reset();
}

void RpcServer::LimitConnections() {
  const int fit = ConnectionsThatFit(transport_.max_connections);
  if (fit < transport_.max_connections) {
    deps_.log.Warning("fewer_connections", {{"max_connections", transport_.max_connections},
                                            {"descriptors_suffice_for", fit},
                                            {"cure", "raise the limit of open files"}});
  }
  connections_ = std::make_shared<ConnectionLimit>(fit, deps_.clock);
  SampledMetrics& sampled = *deps_.metrics.sampled();
  auto sample = [&](const char* transport, auto of) {
    sampled.AddGauge("attnd_connections", {{"transport", transport}},
                     [limit = connections_, of] { return static_cast<double>(limit->open().*of); });
  };
  sample("tcp", &ConnectionLimit::Open::tcp);
  sample("uds", &ConnectionLimit::Open::unix_sockets);
  sampled.AddCounter("attnd_connections_refused_total", {},
                     [limit = connections_] { return static_cast<double>(limit->refused()); });
}

absl::Status RpcServer::Build(const std::vector<std::string>& listen) {
  grpc::EnableDefaultHealthCheckService(true);
  // These ask for no token. Reflection: to callers on this host, or with a certificate. channelz
  // shows every peer's address: only to callers on this host.
  const bool others = ServesOtherHosts(listen);
  const bool certified =
      certificate_files_ != nullptr && certificate_files_->wants_client_certificates();
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  if (!others) grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  if (others && !certified) builder.SetOption(std::make_unique<WithoutReflection>());
  SetMessages(transport_, builder);
  SetConnections(transport_, ProbesBandwidth(transport_, listen), builder);
  for (const std::string& address : listen) RETURN_IF_ERROR(AddAddress(address, builder));
  builder.RegisterService(&service_);
  if (modules_ != nullptr) builder.RegisterService(modules_);
  unary_calls_ = std::make_unique<UnaryCalls>(service_, UnaryThreads(), builder);
  server_ = builder.BuildAndStart();
  if (server_ != nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot listen on ", absl::StrJoin(listen, ", ")));
}

absl::Status RpcServer::AddAddress(const std::string& address, grpc::ServerBuilder& builder) {
  auto listener = Listener::Open(address, transport_.keepalive_timeout);
  if (!listener.ok()) {
    return absl::Status(listener.status().code(),
                        absl::StrCat("--listen: ", listener.status().message()));
  }
  addresses_.push_back(BoundAddress(address, (*listener)->port()));
  doors_.push_back({*std::move(listener),
                    builder.experimental().AddExternalConnectionAcceptor(
                        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
                        CredentialsFor(address))});
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> RpcServer::CredentialsFor(const std::string& address) {
  if (certificate_files_ == nullptr || IsUnixAddress(address)) {
    return grpc::InsecureServerCredentials();
  }
  const TlsOptions& copies = certificate_files_->copies();
  if (certificates_ == nullptr) {
    certificates_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        copies.key, copies.certificate, copies.client_ca, kCopiesRefreshSeconds);
  }
  grpc::experimental::TlsServerCredentialsOptions tls(certificates_);
  tls.watch_identity_key_cert_pairs();
  if (certificate_files_->wants_client_certificates()) {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(tls);
}

void RpcServer::SetServing(const std::string& service, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(service, serving);
}

void RpcServer::StopAccepting() {
  for (Door& door : doors_) door.listener->Stop();
}

void RpcServer::Shutdown(absl::Time deadline) {
  server_->Shutdown(absl::ToChronoTime(WallTime(deadline)));
  unary_calls_->Wait();  // gRPC waits for its callbacks alone
}

}  // namespace attnd
