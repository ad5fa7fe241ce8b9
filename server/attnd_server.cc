#include "server/attnd_server.h"

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/server_builder.h>
#include <netdb.h>
#include <openssl/sha.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/congestion_control.h"
#include "base/cpu_quota.h"
#include "base/event_threads.h"
#include "base/file_descriptor.h"
#include "base/numa.h"
#include "base/payload_receiver.h"
#include "base/received_slices.h"
#include "base/socket_observer.h"
#include "base/status_macros.h"
#include "base/unix_socket_buffer.h"
#include "server/encode_server_info.h"
#include "server/self_test.h"

namespace attnd {
namespace {

// gRPC's own look at the copies of certificates that CertificateWatch makes.
constexpr unsigned kCopiesRefreshSeconds = 1;

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

void SetTransport(const ServerOptions& options, grpc::ServerBuilder& builder) {
  const TransportOptions& transport = options.transport;
  builder.SetMaxReceiveMessageSize(static_cast<int>(transport.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);  // admission has seen to unary replies
  // Compressed requests are refused: 16-bit tensors do not shrink, and a bomb would.
  builder.SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, ProbesBandwidth(options) ? 1 : 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES,
                             static_cast<int>(transport.stream_window_bytes));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE,
                             static_cast<int>(transport.max_frame_bytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, transport.max_concurrent_streams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                             Milliseconds(transport.max_connection_age));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                             Milliseconds(transport.max_connection_age_grace));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             Milliseconds(transport.max_connection_idle));
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             Milliseconds(transport.handshake_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(transport.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             Milliseconds(transport.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Milliseconds(transport.min_ping_interval));
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE,
                             static_cast<int>(transport.max_metadata_bytes));
  grpc::ResourceQuota quota("attnd");
  quota.Resize(static_cast<size_t>(transport.receive_memory_bytes));
  builder.SetResourceQuota(quota);
}

// Unix sockets: gRPC accepts, and is told by shutting a connection down that there are enough. (The
// way to channel arguments that are neither text nor numbers.)
class SocketOption : public grpc::ServerBuilderOption {
 public:
  SocketOption(std::shared_ptr<ConnectionLimit> limit, std::shared_ptr<HeldPeers> held,
               std::shared_ptr<ReceiveMemory> memory)
      : limit_(std::move(limit)), held_(std::move(held)), memory_(std::move(memory)) {}
  void UpdateArguments(grpc::ChannelArguments* arguments) override {
    auto count = [limit = limit_, held = held_, memory = memory_](int socket) {
      limit->TakeOrShutDown(socket);
      PayloadReceiver::Attach(socket, Http2Follower::Peer::kClient, held, memory);
      WidenIfUnixSocket(socket);
      return true;
    };
    ObserveSockets(std::move(count), *arguments);
  }
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>*) override {}

 private:
  const std::shared_ptr<ConnectionLimit> limit_;
  const std::shared_ptr<HeldPeers> held_;
  const std::shared_ptr<ReceiveMemory> memory_;
};

// Whether a process listens on this unix socket. gRPC would take its place without a word.
bool IsListenedTo(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  FileDescriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 ||
         errno == EAGAIN;  // its backlog is full
}

absl::Status CheckUnixSocketsAreFree(const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) {
    if (!IsListenedTo(UnixPath(address))) continue;
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": Address already in use"));
  }
  return absl::OkStatus();
}

// "address port" of who is at the other end.
std::string PeerOf(int socket) {
  sockaddr_storage there{};
  socklen_t size = sizeof(there);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&there), &size) != 0) return "";
  getnameinfo(reinterpret_cast<sockaddr*>(&there), size, host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  return absl::StrCat(host, " ", port);
}

void HandOver(int socket, ConnectionLimit& limit, std::shared_ptr<HeldPeers> held,
              std::shared_ptr<ReceiveMemory> memory,
              grpc::experimental::ExternalConnectionAcceptor& grpc) {
  if (!limit.Take(socket)) {
    close(socket);
    return;
  }
  if (StaysOnThisHost(socket)) SetCongestionControl(socket, kLoopbackCongestion);
  PayloadReceiver::BeginningTls beginning(PayloadReceiver::Attach(
      socket, Http2Follower::Peer::kClient, std::move(held), std::move(memory)));
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.fd = socket;
  grpc.HandleNewConnection(&connection);
}

// On 16 cores 4 move a little more than 8 do (docs/PERFORMANCE.md).
int ReplyThreadCount() { return std::clamp(AvailableCpus() / 4, 1, 8); }

// Leases get their share of each device that has memory of its own.
ServerOptions WithDeviceLeases(ServerOptions options,
                               const std::vector<std::unique_ptr<Backend>>& engines) {
  for (const std::unique_ptr<Backend>& engine : engines) {
    const bool own = engine->Use().memory_total_bytes > 0;
    const auto bytes = own ? static_cast<double>(engine->info().memory_bytes) : 0;
    options.leases.device_bytes.push_back(static_cast<int64_t>(options.lease_hbm_fraction * bytes));
  }
  return options;
}

// This replica among others, the same after each start: its host's name and what it listens on.
uint64_t ReplicaOf(const ServerOptions& options) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  const std::string text = absl::StrCat(host, "\n", absl::StrJoin(options.listen, "\n"));
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  uint64_t replica = 0;
  std::memcpy(&replica, digest, sizeof(replica));
  return replica;
}

// "127.0.0.1:0" with the port that was bound.
std::string BoundAddress(const std::string& asked, int port) {
  return absl::StrCat(asked.substr(0, asked.rfind(':')), ":", port);
}

}  // namespace

AttndServer::AttndServer(const ServerOptions& options,
                         std::vector<std::unique_ptr<Backend>> engines, StagingPool staging,
                         const Clock& clock, Logger& log)
    : options_(WithDeviceLeases(options, engines)),
      clock_(clock),
      log_(log),
      staging_(std::move(staging)) {
  for (std::unique_ptr<Backend>& engine : engines) {
    const BackendInfo& info = engine->info();
    std::string name = info.backend;
    if (info.backend == "cuda") {
      name = absl::StrCat("gpu", info.ordinal);
    } else if (engines.size() > 1) {
      name = absl::StrCat(name, devices_.size());
    }
    Device& device = devices_.emplace_back(std::move(name), std::move(engine));
    int number = metrics_.AddDevice(device.name, device.engine->info());
    device.backend = std::make_unique<MeteredBackend>(*device.engine, number, metrics_);
  }
  metrics_.SetBuildInfo(options_.version, options_.revision,
                        devices_.front().engine->info().architecture);
  shared_memory_ =
      std::make_unique<SharedMemoryTable>(options_.shared_memory, *devices_.front().engine);
}

absl::StatusOr<std::unique_ptr<AttndServer>> AttndServer::Start(const ServerOptions& options,
                                                                std::unique_ptr<Backend> backend,
                                                                const Clock& clock, Logger& log) {
  std::vector<std::unique_ptr<Backend>> engines;
  engines.push_back(std::move(backend));
  return Start(options, std::move(engines), clock, log);
}

absl::StatusOr<std::unique_ptr<AttndServer>> AttndServer::Start(
    const ServerOptions& options, std::vector<std::unique_ptr<Backend>> engines, const Clock& clock,
    Logger& log) {
  RETURN_IF_ERROR(CheckUnixSocketsAreFree(options.listen));
  ASSIGN_OR_RETURN(StagingPool staging, StagingPool::Create(options.admission.memory_bytes));
  auto server = std::unique_ptr<AttndServer>(
      new AttndServer(options, std::move(engines), std::move(staging), clock, log));
  if (!options.tls.certificate.empty()) {
    ASSIGN_OR_RETURN(server->certificate_watch_, CertificateWatch::Start(options.tls, log));
  }
  RETURN_IF_ERROR(server->StartDevices());
  if (!options.token_file.empty()) {
    ASSIGN_OR_RETURN(server->auth_, Authenticator::FromTokenFile(options.token_file));
    server->token_watch_ =
        std::make_unique<TokenWatch>(options.token_file, options.tls.refresh, server->auth_, log);
  }
  uint64_t boot_epoch = NewBootEpoch();
  server->leases_ = std::make_unique<LeaseTable>(server->options_.leases,
                                                 TokenIssuer{ReplicaOf(options), boot_epoch},
                                                 server->metrics_, clock);
  server->StartWorkers();
  server->reaper_ = std::make_unique<LeaseReaper>(*server->leases_);
  server->SampleState();
  server->server_info_ = DescribeServer(server->options_, server->Engines(), boot_epoch);
  server->StartSharedMemory();
  RETURN_IF_ERROR(server->StartMetrics());
  RETURN_IF_ERROR(server->StartGrpc());
  for (int n = 0; n < static_cast<int>(server->devices_.size()); ++n) {
    server->metrics_.SetDeviceUp(n, true);
    server->SetDeviceServing(server->devices_[n], true);
  }
  server->SetServing(true);
  server->StartGpuWatch();
  return server;
}

std::vector<const Backend*> AttndServer::Engines() const {
  std::vector<const Backend*> engines;
  for (const Device& device : devices_) engines.push_back(device.engine.get());
  return engines;
}

// Page-locks the staging memory once, for all GPUs, and asks each for a known answer.
absl::Status AttndServer::StartDevices() {
  PlaceStaging();
  RETURN_IF_ERROR(devices_.front().engine->RegisterHost(staging_.memory()));
  for (Device& device : devices_) RETURN_IF_ERROR(SelfTest(*device.engine, device.cost));
  return absl::OkStatus();
}

void AttndServer::StartWorkers() {
  AdmissionLimits limits = options_.admission;
  limits.max_reply_bytes = options_.transport.max_message_bytes - kReplyHeaderBytes;
  std::vector<AdmissionDevice> devices;
  for (Device& device : devices_) devices.push_back({device.backend.get(), &device.cost});
  admission_ = std::make_unique<Admission>(limits, std::move(devices), clock_, leases_.get());
  reply_threads_ = std::make_unique<ReplyThreads>(ReplyThreadCount());
  workers_ = std::make_unique<Workers>();
  for (int n = 0; n < static_cast<int>(devices_.size()); ++n) {
    DeviceWorkerDeps deps{*devices_[n].backend,
                          devices_[n].cost,
                          metrics_,
                          clock_,
                          n,
                          leases_.get(),
                          [this, n](const absl::Status& status) { LoseDevice(n, status); }};
    workers_->Add(std::make_unique<DeviceWorker>(deps, options_.worker));
  }
}

// On a worker's thread. The others go on; the process ends when its owner has drained it.
void AttndServer::LoseDevice(int device, const absl::Status& status) {
  admission_->Fence(device);
  leases_->LoseDevice(device);
  metrics_.SetReady(false);
  metrics_.SetDeviceUp(device, false);
  SetDeviceServing(devices_[device], false);
  SetServing(false);
  log_.Error("device_lost", {{"device", devices_[device].name}, {"message", status.message()}});
  ++lost_devices_;
}

// A socket that cannot be had costs speed only: callers then send their tensors.
void AttndServer::StartSharedMemory() {
  if (!options_.shared_memory.enabled) return;
  for (const std::string& address : options_.listen) {
    std::string path = UnixPath(address);
    if (path.empty()) continue;
    auto listener = SharedMemoryService::Start(path, options_.shared_memory.max_connections,
                                               *shared_memory_, auth_, log_);
    if (!listener.ok()) {
      log_.Log(Severity::kWarning, "no_shared_memory", {{"error", listener.status().message()}});
      continue;
    }
    server_info_.set_shared_memory_socket((*listener)->path());
    shared_memory_services_.push_back(*std::move(listener));
  }
}

// The staging memory on the memory nodes of the GPUs that read it, before its first page is
// touched.
void AttndServer::PlaceStaging() {
  std::set<int> nodes;
  for (const Device& device : devices_) {
    const std::optional<int> node = NumaNodeOfPciDevice(device.engine->info().pci_bus_id);
    if (node.has_value()) nodes.insert(*node);
  }
  if (nodes.empty() || NumaNodes().size() == 1) return;
  const std::vector<int> list(nodes.begin(), nodes.end());
  const absl::Status status = PreferNumaNodes(staging_.memory(), list);
  log_.Log(status.ok() ? Severity::kInfo : Severity::kWarning, "staging_numa_nodes",
           {{"nodes", absl::StrJoin(list, ",")}, {"status", status.ToString()}});
}

// Without NVIDIA's management library only CUDA's own errors tell of a GPU's end.
void AttndServer::StartGpuWatch() {
  std::vector<std::string> gpus;
  for (const Device& device : devices_) gpus.push_back(device.engine->info().pci_bus_id);
  if (std::all_of(gpus.begin(), gpus.end(), [](const auto& id) { return id.empty(); })) return;
  auto watch = GpuWatch::Start(
      options_.nvml_library, gpus,
      [this](int device, const absl::Status& status) { workers_->Lose(device, status); });
  if (!watch.ok()) {
    return log_.Log(Severity::kInfo, "no_gpu_watch", {{"message", watch.status().message()}});
  }
  gpu_watch_ = *std::move(watch);
}

absl::Status AttndServer::StartMetrics() {
  if (options_.metrics_listen.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(metrics_port_, MetricsPort::Open(options_.metrics_listen, metrics_));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> AttndServer::Credentials(
    const std::string& address) {
  if (options_.tls.certificate.empty() || IsUnixAddress(address)) {
    return grpc::InsecureServerCredentials();
  }
  if (certificates_ == nullptr) {
    const TlsOptions& copies = certificate_watch_->copies();
    certificates_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        copies.key, copies.certificate, copies.client_ca, kCopiesRefreshSeconds);
  }
  grpc::experimental::TlsServerCredentialsOptions tls(certificates_);
  tls.watch_identity_key_cert_pairs();
  if (!options_.tls.client_ca.empty()) {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(tls);
}

void AttndServer::HoldWastefulPeers() {
  const TransportOptions& transport = options_.transport;
  const WastedWork::Limits limits = {
      .frames_per_second = transport.max_wasted_frames,
      .header_bytes = transport.max_metadata_bytes,
      // So that no stream is cut for what was read late.
      .crumb_hold = std::min(WastedWork::Limits().crumb_hold, transport.streams.idle / 3)};
  auto on_hold = [this](int socket, absl::Duration time, int64_t total) {
    log_.Warning("peer_held", {{"peer", PeerOf(socket)},
                               {"seconds", absl::ToDoubleSeconds(time)},
                               {"held_so_far", total}});
  };
  held_peers_ = std::make_shared<HeldPeers>(limits, std::move(on_hold));
}

void AttndServer::LimitReceiveMemory() {
  const int64_t bytes = options_.transport.receive_memory_bytes;
  SetReceivedSlicesSmallBeyond(bytes / 4);
  auto on_reset = [this](int socket, int64_t bytes, int64_t total) {
    log_.Warning("connection_reset_for_memory",
                 {{"peer", PeerOf(socket)}, {"unfinished_bytes", bytes}, {"reset_so_far", total}});
  };
  receive_memory_ =
      std::make_shared<ReceiveMemory>(bytes, ReceivedSliceBytes(), std::move(on_reset));
  receive_memory_->Start();
}

void AttndServer::LimitConnections(grpc::ServerBuilder& builder) {
  const int wanted = options_.transport.max_connections, fit = ConnectionsThatFit(wanted);
  if (fit < wanted) {
    log_.Warning("fewer_connections", {{"max_connections", wanted},
                                       {"descriptors_suffice_for", fit},
                                       {"cure", "raise the limit of open files"}});
  }
  connections_ = std::make_shared<ConnectionLimit>(fit, clock_);
  builder.SetOption(std::make_unique<SocketOption>(connections_, held_peers_, receive_memory_));
  auto sample = [this](const char* transport, auto of) {
    metrics_.sampled()->AddGauge(
        "attnd_connections", "Open connections of the gRPC ports and sockets.",
        {{"transport", transport}},
        [limit = connections_, of] { return static_cast<double>(limit->open().*of); });
  };
  sample("tcp", &ConnectionLimit::Open::tcp);
  sample("uds", &ConnectionLimit::Open::unix_sockets);
  metrics_.sampled()->AddCounter(
      "attnd_connections_refused_total", "Connections closed at once, above --max_connections.", {},
      [limit = connections_] { return static_cast<double>(limit->refused()); });
}

absl::Status AttndServer::StartGrpc() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  // channelz shows every peer's address: only to callers on this machine.
  if (!ServesOtherHosts(options_)) grpc::channelz::experimental::InitChannelzService();
  stream_watch_ = std::make_unique<StreamWatch>(options_.transport.streams, clock_);
  event_threads_ = std::make_unique<EventThreads>(std::clamp(AvailableCpus(), 3, 32));
  service_ = std::make_unique<AttentionService>(
      ServiceDeps{*admission_, staging_, *shared_memory_, *workers_, *leases_, *reply_threads_,
                  metrics_, auth_, clock_, log_, devices_.front().engine->info(), server_info_,
                  options_.slow_call, log_limit_, *stream_watch_, open_calls_});
  grpc::ServerBuilder builder;
  SetTransport(options_, builder);
  HoldWastefulPeers();
  LimitReceiveMemory();
  LimitConnections(builder);
  ASSIGN_OR_RETURN(Acceptors acceptors, OpenPorts(builder));
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", absl::StrJoin(options_.listen, ", ")));
  }
  for (size_t n = 0; n < listeners_.size(); ++n) {
    listeners_[n]->Start([limit = connections_, held = held_peers_, memory = receive_memory_,
                          acceptor = std::shared_ptr(std::move(acceptors[n]))](int socket) {
      HandOver(socket, *limit, held, memory, *acceptor);
    });
  }
  return absl::OkStatus();
}

// gRPC listens on unix sockets itself; of TCP we do, and it gets the connections.
absl::StatusOr<AttndServer::Acceptors> AttndServer::OpenPorts(grpc::ServerBuilder& builder) {
  Acceptors acceptors;
  for (const std::string& address : options_.listen) {
    ASSIGN_OR_RETURN(auto credentials, Credentials(address));
    if (IsUnixAddress(address)) {
      builder.AddListeningPort(address, credentials);
      addresses_.push_back(address);
      continue;
    }
    ASSIGN_OR_RETURN(auto listener,
                     TcpListener::Open(address, options_.transport.keepalive_timeout));
    addresses_.push_back(BoundAddress(address, listener->port()));
    listeners_.push_back(std::move(listener));
    acceptors.push_back(builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials));
  }
  return acceptors;
}

void AttndServer::SetDeviceServing(const Device& device, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(
      absl::StrCat("attnd.v1.Attention/", device.name), serving);
}

void AttndServer::SetServing(bool serving) {
  metrics_.SetReady(serving);
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  health->SetServingStatus("", serving);
  health->SetServingStatus("attnd.v1.Attention", serving);
  health->SetServingStatus("liveness", true);  // a draining process is alive: do not restart it
}

AttndServer::~AttndServer() {
  gpu_watch_.reset();  // it would lose a device of workers that are gone
  if (server_ != nullptr) StopNow();
  workers_.reset();  // answers what is left, before the service goes
  reply_threads_.reset();
  server_.reset();
  if (held_peers_ != nullptr) held_peers_->Stop();
  if (receive_memory_ != nullptr) receive_memory_->Stop();
  CHECK(open_calls_.count() == 0);  // gRPC has ended them all: what they use may go
}

}  // namespace attnd
