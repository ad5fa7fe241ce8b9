#include "server/app/attnd_server.h"

#include <openssl/sha.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "net/listen_address.h"
#include "server/app/encode_server_info.h"
#include "server/app/metrics_port.h"
#include "server/keep/mask_arrivals.h"
#include "server/metrics/module_metrics.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_table.h"
#include "server/modules/modules_service.h"
#include "server/rpc/call_watch.h"
#include "server/rpc/mask_workers.h"
#include "server/rpc/rpc_server.h"
#include "server/rpc/service_deps.h"
#include "server/security/certificate_watch.h"
#include "server/security/token_watch.h"
#include "server/shared_memory/shared_memory_service.h"

namespace attnd {
namespace {

// On 16 cores 4 move a little more than 8 do.
int TransferThreadCount() { return std::clamp(AvailableCpus() / 4, 1, 8); }

constexpr absl::Duration kExpireLeasesEvery = absl::Seconds(1);

// A caller has one of them at a time; two callers need not wait for each other.
int MaskThreadCount() { return std::clamp(AvailableCpus() / 4, 2, 4); }

// Leases get their share of each device that has memory of its own.
ServerOptions WithDeviceLeases(ServerOptions options, const std::vector<Device>& devices) {
  for (const Device& device : devices) {
    const bool own = device.attention->Use().memory_total_bytes > 0;
    const auto bytes = own ? static_cast<double>(device.attention->info().memory_bytes) : 0;
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
  RETURN_IF_ERROR(server->StartSecurity());
  RETURN_IF_ERROR(server->devices_.Check(server->staging_));
  const uint64_t boot_epoch = NewBootEpoch();
  server->StartCalls(boot_epoch);
  server->server_info_ = DescribeServer(server->options_, server->devices_.engines(), boot_epoch);
  server->StartModules(boot_epoch);
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

// What a call passes through, from admission to its reply.
void AttndServer::StartCalls(uint64_t boot_epoch) {
  leases_ = std::make_unique<LeaseTable>(
      options_.leases, TokenIssuer{ReplicaOf(options_), boot_epoch}, metrics_, clock_);
  expires_leases_ = std::make_unique<Periodic>(kExpireLeasesEvery, [this] { leases_->Expire(); });
  masks_ = std::make_unique<MaskStore>(options_.masks, clock_, options_.mask_plans);
  maps_ = std::make_unique<MapStore>(options_.captures,
                                     TokenIssuer{ReplicaOf(options_), boot_epoch}, clock_);
  mask_workers_ =
      std::make_unique<MaskWorkers>(MaskThreadCount(), options_.admission.caller_max_calls);
  mask_arrivals_ =
      std::make_unique<MaskArrivals>(options_.masks.bytes, options_.masks.bytes_of_caller);
  for (int n = 0; n < devices_.size(); ++n) {
    named_engines_.push_back({devices_[n].name, devices_[n].engine.get()});
  }
  AdmissionLimits limits = options_.admission;
  limits.max_reply_bytes = options_.transport.max_message_bytes - kReplyHeaderBytes;
  admission_ = std::make_unique<Admission>(limits, devices_.for_admission(), clock_, leases_.get());
  transfers_ = std::make_unique<TaskQueue>(TransferThreadCount());
  TransferLimits transfers = options_.transport.transfers;
  transfers.longest = options_.admission.max_deadline;
  call_watch_ = std::make_unique<CallWatch>(transfers);
  const bool on_device =
      absl::c_any_of(options_.leases.device_bytes, [](int64_t bytes) { return bytes > 0; });
  shared_memory_ = std::make_unique<SharedMemoryTable>(options_.shared_memory,
                                                       devices_.first_engine(), on_device);
  devices_.StartWorkers(
      options_.worker, clock_, *leases_, *maps_,
      [this](int device, const absl::Status& status) { LoseDevice(device, status); });
}

// On a worker's thread. The others go on; the process ends when its owner has drained it.
void AttndServer::LoseDevice(int device, const absl::Status& status) {
  admission_->Fence(device);
  leases_->LoseDevice(device);
  if (module_table_ != nullptr) module_table_->LoseDevice(device);
  SetDeviceServing(device, false);
  SetServing(false);
  log_.Error("device_lost", {{"device", devices_[device].name}, {"message", status.message()}});
}

// The GPUs' memory, where they compute modules.
ModuleOptions AttndServer::OptionsOfModules() {
  ModuleOptions options = options_.modules;
  if (!devices_[0].has_own_memory()) return options;
  ModuleMemoryLimits& memory = options.memory;
  const bool all_of_one = memory.caller_bytes == memory.bytes;
  int64_t most = 0;
  for (const Backend* gpu : devices_.engines()) {
    const double share = options.memory_is_share ? options.hbm_fraction : 1;
    const auto bytes = static_cast<int64_t>(share * static_cast<double>(gpu->info().memory_bytes));
    memory.device_bytes.push_back(bytes);
    most += bytes;
  }
  memory.bytes = options.memory_is_share ? most : std::min(memory.bytes, most);
  memory.caller_bytes = all_of_one ? memory.bytes : std::min(memory.caller_bytes, memory.bytes);
  return options;
}

void AttndServer::StartModules(uint64_t boot_epoch) {
  if (options_.modules.memory.bytes == 0) return;
  module_engine_ = devices_.MakeModuleEngine([this](int device) {
    return [this, device](int64_t bytes) { return admission_->HoldDeviceMemory(device, bytes); };
  });
  if (module_engine_ == nullptr) return;
  std::vector<std::string> names = devices_.names();
  module_metrics_ = std::make_unique<ModuleMetrics>(metrics_.registry(), names);
  module_table_ = std::make_unique<ModuleTable>(
      OptionsOfModules(), TokenIssuer{ReplicaOf(options_), boot_epoch}, clock_);
  module_calls_ = std::make_unique<ModuleCalls>(ModuleCalls::Deps{
      *module_table_, *module_engine_, staging_, *module_metrics_, std::move(names),
      options_.leases.ttl, options_.leases.max_ttl, options_.modules.state_dir,
      options_.modules.save_every, options_.modules.shadow_every, log_});
  modules_service_ = std::make_unique<ModulesService>(
      ModulesService::Deps{*module_calls_,
                           {clock_, metrics_, *call_watch_, open_calls_},
                           auth_,
                           *module_metrics_,
                           log_,
                           log_limit_,
                           options_.admission.max_deadline});
  server_info_.add_feature("modules");
  server_info_.add_feature(absl::StrCat("modules_on_", module_engine_->Name()));
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
                                                    [this] { return serving_.load(); }));
  return absl::OkStatus();
}

absl::Status AttndServer::StartRpc() {
  const ServiceDeps deps{*admission_,
                         staging_,
                         *shared_memory_,
                         devices_.workers(),
                         *leases_,
                         *masks_,
                         *maps_,
                         *mask_workers_,
                         *mask_arrivals_,
                         *transfers_,
                         metrics_,
                         auth_,
                         clock_,
                         log_,
                         devices_.first_engine().info(),
                         named_engines_,
                         server_info_,
                         options_.slow_call,
                         log_limit_,
                         *call_watch_,
                         open_calls_};
  ASSIGN_OR_RETURN(rpc_, RpcServer::Start(options_.listen, options_.transport,
                                          certificate_watch_.get(), deps, modules_service_.get()));
  for (int n = 0; n < devices_.size(); ++n) SetDeviceServing(n, true);
  SetServing(true);
  return absl::OkStatus();
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
  if (modules_service_ != nullptr) rpc_->SetServing("attnd.v1.Modules", serving);
  rpc_->SetServing("liveness", true);  // a draining process is alive: do not restart it
}

const std::vector<std::string>& AttndServer::addresses() const { return rpc_->addresses(); }

int AttndServer::metrics_port() const {
  return metrics_port_ == nullptr ? 0 : metrics_port_->port();
}

int AttndServer::connections() const { return rpc_->connections(); }

int64_t AttndServer::module_bytes() const { return module_table_->memory().used(); }

void AttndServer::ExpireModules() { module_table_->Expire(); }

// Nothing may lose a device, or answer a call, once the server is gone.
AttndServer::~AttndServer() {
  devices_.StopGpuWatch();
  if (rpc_ != nullptr) StopNow();
  devices_.StopWorkers();
  transfers_.reset();
  rpc_.reset();
  modules_service_.reset();
  mask_workers_.reset();
  CHECK(open_calls_.count() == 0);  // gRPC has ended them all: what they use may go
}

}  // namespace attnd
