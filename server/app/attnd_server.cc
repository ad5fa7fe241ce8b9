#include "server/app/attnd_server.h"

#include <openssl/sha.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "net/listen_address.h"
#include "server/app/encode_server_info.h"
#include "server/app/metrics_port.h"
#include "server/keep/keep.h"
#include "server/modules/modules.h"
#include "server/rpc/calls.h"
#include "server/rpc/rpc_server.h"
#include "server/rpc/service_deps.h"
#include "server/security/certificate_watch.h"
#include "server/security/token_watch.h"
#include "server/shared_memory/shared_memory_service.h"

namespace attnd {
namespace {

// Leases get their share of each device that has memory of its own.
ServerOptions WithDeviceLeases(ServerOptions options, const std::vector<Device>& devices) {
  for (const Device& device : devices) {
    const bool own = device.attention->Use().memory_total_bytes > 0;
    const auto bytes = own ? static_cast<double>(device.attention->info().memory_bytes) : 0;
    options.leases.device_bytes.push_back(static_cast<int64_t>(options.lease_hbm_fraction * bytes));
  }
  return options;
}

// Modules get GPUs' memory, where they compute there.
ModuleOptions WithDeviceMemory(ModuleOptions options, const Devices& devices) {
  if (!devices[0].has_own_memory()) return options;
  ModuleMemoryLimits& memory = options.memory;
  const bool all_of_one = memory.caller_bytes == memory.bytes;
  int64_t most = 0;
  for (const Backend* gpu : devices.engines()) {
    const double share = options.memory_is_share ? options.hbm_fraction : 1;
    const auto bytes = static_cast<int64_t>(share * static_cast<double>(gpu->info().memory_bytes));
    memory.device_bytes.push_back(bytes);
    most += bytes;
  }
  memory.bytes = options.memory_is_share ? most : std::min(memory.bytes, most);
  memory.caller_bytes = all_of_one ? memory.bytes : std::min(memory.caller_bytes, memory.bytes);
  return options;
}

StateLimits StateLimitsOf(const ModuleOptions& options) {
  const int64_t bytes =
      options.state_bytes > 0 ? options.state_bytes : kStatesOfMemory * options.memory.bytes;
  return {bytes, options.state_age};
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

}  // namespace

AttndServer::AttndServer(const ServerOptions& options, std::vector<Device> devices,
                         StagingPool staging, const Clock& clock, Logger& log)
    : options_(WithDeviceLeases(options, devices)),
      clock_(clock),
      log_(log),
      staging_(std::move(staging)),
      devices_(std::move(devices), metrics_, log) {
  metrics_.SetBuildInfo(options_.version, options_.revision,
                        devices_.first_engine().info().architecture);
}

absl::StatusOr<std::unique_ptr<AttndServer>> AttndServer::Start(const ServerOptions& options,
                                                                Device device, const Clock& clock,
                                                                Logger& log) {
  std::vector<Device> devices;
  devices.push_back(std::move(device));
  return Start(options, std::move(devices), clock, log);
}

absl::StatusOr<std::unique_ptr<AttndServer>> AttndServer::Start(const ServerOptions& options,
                                                                std::vector<Device> devices,
                                                                const Clock& clock, Logger& log) {
  ASSIGN_OR_RETURN(StagingPool staging, StagingPool::Create(options.admission.memory_bytes));
  auto server = std::unique_ptr<AttndServer>(
      new AttndServer(options, std::move(devices), std::move(staging), clock, log));
  if (!options.otlp_endpoint.empty()) {
    RETURN_IF_ERROR(server->metrics_.ExportSpans(options.otlp_endpoint, options.version));
  }
  RETURN_IF_ERROR(server->StartSecurity());
  RETURN_IF_ERROR(server->devices_.Check(server->staging_));
  const TokenIssuer issuer{ReplicaOf(options), NewBootEpoch()};
  server->StartCalls(issuer);
  server->server_info_ =
      DescribeServer(server->options_, server->devices_.engines(), issuer.boot_epoch);
  RETURN_IF_ERROR(server->StartModules(issuer));
  server->StartSharedMemory();
  server->SampleState();
  RETURN_IF_ERROR(server->StartMetrics());
  RETURN_IF_ERROR(server->StartRpc());
  server->devices_.StartGpuWatch(server->options_.nvml_library);
  return server;
}

absl::Status AttndServer::StartSecurity() {
  if (!options_.tls.certificate.empty()) {
    ASSIGN_OR_RETURN(certificate_watch_, CertificateWatch::Start(options_.tls, log_));
  }
  if (options_.token_file.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(auth_, Authenticator::FromTokenFile(options_.token_file));
  const std::string exposure = TokenFileExposure(options_.token_file);
  if (!exposure.empty()) log_.Warning("token_file_exposed", {{"message", exposure}});
  token_watch_ =
      std::make_unique<TokenWatch>(options_.token_file, options_.tls.refresh, auth_, log_);
  return absl::OkStatus();
}

void AttndServer::StartCalls(const TokenIssuer& issuer) {
  keep_ = std::make_unique<Keep>(
      KeepLimits{.leases = options_.leases, .masks = options_.masks, .maps = options_.captures},
      issuer, options_.mask_plans, metrics_, clock_);
  AdmissionLimits limits = options_.admission;
  limits.max_reply_bytes = options_.transport.max_message_bytes - kReplyHeaderBytes;
  TransferLimits transfers = options_.transport.transfers;
  transfers.longest = options_.admission.max_deadline;
  calls_ =
      std::make_unique<Calls>(limits, transfers, devices_.for_admission(), keep_->leases(), clock_);
  const bool on_device =
      absl::c_any_of(options_.leases.device_bytes, [](int64_t bytes) { return bytes > 0; });
  shared_memory_ = std::make_unique<SharedMemoryTable>(options_.shared_memory,
                                                       devices_.first_engine(), on_device);
  devices_.StartWorkers(
      options_.worker, clock_, keep_->leases(), keep_->maps(),
      [this](int device, const absl::Status& status) { LoseDevice(device, status); });
}

// On a worker's thread. The others go on; the process ends when its owner has drained it.
void AttndServer::LoseDevice(int device, const absl::Status& status) {
  calls_->admission().Fence(device);
  keep_->leases().LoseDevice(device);
  if (modules_ != nullptr) modules_->table().LoseDevice(device);
  SetDeviceServing(device, false);
  SetServing(false);
  log_.Error("device_lost", {{"device", devices_[device].name},
                             {"message", status.message()},
                             {"cure", "look for Xid errors in dmesg; a restart resets the GPU"}});
}

absl::Status AttndServer::StartModules(const TokenIssuer& issuer) {
  if (options_.modules.memory.bytes == 0) return absl::OkStatus();
  std::unique_ptr<ModuleEngine> engine = devices_.MakeModuleEngine([this](int device) {
    return [admission = &calls_->admission(), device](int64_t bytes) {
      return admission->HoldDeviceMemory(device, bytes);
    };
  });
  if (engine == nullptr) return absl::OkStatus();
  const ModuleOptions options = WithDeviceMemory(options_.modules, devices_);
  std::unique_ptr<StateRoot> states;
  if (!options.state_dir.empty()) {
    ASSIGN_OR_RETURN(states, StateRoot::Open(options.state_dir, StateLimitsOf(options)));
  }
  modules_ =
      std::make_unique<Modules>(options, std::move(states), std::move(engine), devices_.names(),
                                issuer, options_.leases, options_.admission.max_deadline,
                                Modules::Deps{staging_, keep_->leases(), *shared_memory_, *calls_,
                                              metrics_, auth_, clock_, log_});
  calls_->SetModuleQueue([this](int device) { return modules_->QueueSeconds(device); });
  server_info_.add_feature("modules");
  server_info_.add_feature(absl::StrCat("modules_on_", modules_->engine().Name()));
  return absl::OkStatus();
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

absl::Status AttndServer::StartMetrics() {
  if (options_.metrics_listen.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(metrics_port_, MetricsPort::Open(options_.metrics_listen, metrics_,
                                                    {.ready = [this] { return serving_.load(); },
                                                     .alive = [this] { return CheckAlive(); }}));
  return absl::OkStatus();
}

absl::Status AttndServer::StartRpc() {
  for (int n = 0; n < devices_.size(); ++n) {
    named_engines_.push_back({devices_[n].name, devices_[n].engine.get()});
  }
  const ServiceDeps deps{*keep_,
                         *calls_,
                         staging_,
                         *shared_memory_,
                         devices_.workers(),
                         metrics_,
                         auth_,
                         clock_,
                         log_,
                         devices_.first_engine().info(),
                         named_engines_,
                         server_info_,
                         options_.slow_call};
  ASSIGN_OR_RETURN(
      rpc_, RpcServer::Start(options_.listen, options_.transport, certificate_watch_.get(), deps,
                             modules_ == nullptr ? nullptr : &modules_->service()));
  for (int n = 0; n < devices_.size(); ++n) SetDeviceServing(n, true);
  SetServing(true);
  started_ = true;
  return absl::OkStatus();
}

absl::Status AttndServer::CheckAlive() const {
  if (!started_) return absl::OkStatus();
  const absl::Time now = clock_.Now();
  for (int n = 0; n < devices_.size(); ++n) {
    if (devices_.workers().stuck_at(n) <= now) {
      return absl::InternalError(absl::StrCat(devices_[n].name, ": a launch does not end"));
    }
    if (modules_ != nullptr && modules_->stuck_at(n) <= now) {
      return absl::InternalError(absl::StrCat(devices_[n].name, ": a module's call does not end"));
    }
  }
  if (rpc_->stuck_at() > now) return absl::OkStatus();
  return absl::InternalError("a thread that takes calls hangs");
}

void AttndServer::SetDeviceServing(int device, bool serving) {
  metrics_.SetDeviceUp(device, serving);
  rpc_->SetServing(absl::StrCat("attnd.v1.Attention/", devices_[device].name), serving);
}

void AttndServer::SetServing(bool serving) {
  serving_ = serving;
  metrics_.SetReady(serving);
  rpc_->SetServing("", serving);
  rpc_->SetServing("attnd.v1.Attention", serving);
  if (modules_ != nullptr) rpc_->SetServing("attnd.v1.Modules", serving);
  rpc_->SetServing("liveness", true);  // a draining process is alive: do not restart it
}

const std::vector<std::string>& AttndServer::addresses() const { return rpc_->addresses(); }

int AttndServer::metrics_port() const {
  return metrics_port_ == nullptr ? 0 : metrics_port_->port();
}

int AttndServer::connections() const { return rpc_->connections(); }

AdmissionUse AttndServer::use() const { return calls_->admission().Use(); }

int64_t AttndServer::call_bytes() const { return calls_->call_bytes().held(); }

AdmissionDeviceUse AttndServer::use(int device) const {
  return calls_->admission().DeviceUse(device);
}

LeaseUse AttndServer::leases() const { return keep_->leases().Use(); }

LeaseUse AttndServer::leases(int place) const { return keep_->leases().Use(place); }

MaskTableStats AttndServer::masks() const { return keep_->masks().stats(); }

int64_t AttndServer::module_bytes() const { return modules_->table().memory().used(); }

// Nothing may lose a device, or answer a call, once the server is gone.
AttndServer::~AttndServer() {
  devices_.StopGpuWatch();
  if (rpc_ != nullptr) StopNow();
  devices_.StopWorkers();
  if (calls_ != nullptr) calls_->FinishTransfers();
}

}  // namespace attnd
