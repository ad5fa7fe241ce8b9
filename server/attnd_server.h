// AttndServer: the daemon's parts, built in the order of the arrow and taken down in reverse. main
// owns one; tests build it in-process with an engine and options of their own.
//
//   Start        engines' self-tests → pools → workers → metrics port → gRPC ports → SERVING
//   a device     is fenced (no new calls), its calls fail, and the server is NOT_SERVING: whoever
//   is lost      owns it drains it (other devices finish) and ends the process
//   Drain        NOT_SERVING, still takes calls for `delay` while it has a device; then refuses new
//                ones (DRAINING) until none has come for a while, closes the ports, and finishes
//                what runs; all of it within `timeout`. gRPC cancels a call that arrives while it
//                closes, so it closes when callers have left, or after three seconds of those who
//                never do. Watchers of health do not hold it up.
// Any thread may ask for addresses; Start and Drain by one.
#pragma once

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/event_threads.h"
#include "base/held_peers.h"
#include "base/log.h"
#include "base/receive_memory.h"
#include "kernels/backend.h"
#include "server/admission.h"
#include "server/auth.h"
#include "server/certificate_watch.h"
#include "server/connection_limit.h"
#include "server/cost_model.h"
#include "server/device_worker.h"
#include "server/gpu_watch.h"
#include "server/lease_reaper.h"
#include "server/lease_table.h"
#include "server/metered_backend.h"
#include "server/metrics.h"
#include "server/metrics_port.h"
#include "server/open_calls.h"
#include "server/options.h"
#include "server/reply_threads.h"
#include "server/service.h"
#include "server/shared_memory.h"
#include "server/shared_memory_service.h"
#include "server/staging_pool.h"
#include "server/tcp_listener.h"
#include "server/token_watch.h"
#include "server/workers.h"

namespace attnd {

class AttndServer {
 public:
  // `options` have passed CheckOptions. Errors: what the self test, the files or the ports say.
  // `clock` and `log` outlive the server.
  static absl::StatusOr<std::unique_ptr<AttndServer>> Start(const ServerOptions& options,
                                                            std::unique_ptr<Backend> backend,
                                                            const Clock& clock, Logger& log);
  // Several devices: one engine each, at least one.
  static absl::StatusOr<std::unique_ptr<AttndServer>> Start(
      const ServerOptions& options, std::vector<std::unique_ptr<Backend>> engines,
      const Clock& clock, Logger& log);
  ~AttndServer();

  // As bound: a port of 0 has become the real one. In the order of options.listen.
  const std::vector<std::string>& addresses() const { return addresses_; }
  int metrics_port() const { return metrics_port_ == nullptr ? 0 : metrics_port_->port(); }
  AdmissionUse use() const { return admission_->Use(); }
  AdmissionDeviceUse use(int device) const { return admission_->DeviceUse(device); }
  int64_t staging_used() const { return staging_.used(); }
  LeaseUse leases() const { return leases_->Use(); }
  LeaseUse leases(int place) const { return leases_->Use(place); }
  int connections() const { return connections_->open().all(); }
  int64_t connections_held() const { return held_peers_->total(); }
  ReceiveMemory& receive_memory() const { return *receive_memory_; }
  // Whether a device has been lost: time to drain and to end the process.
  bool device_lost() const { return lost_devices_ > 0; }
  bool all_devices_lost() const { return lost_devices_ == static_cast<int>(devices_.size()); }
  SharedMemoryUse shared_memory_use() const { return shared_memory_->Use(); }

  // Returns when every call is answered or `timeout` has passed (what then still runs is
  // cancelled). `wait(delay)` waits; it returns false to cut the drain short, as a second SIGTERM
  // does.
  void Drain(absl::Duration delay, absl::Duration timeout,
             const std::function<bool(absl::Duration)>& wait = WaitOut);
  // Without the courtesy: cancels what runs.
  void StopNow();

 private:
  // An engine at work.
  struct Device {
    Device(std::string device_name, std::unique_ptr<Backend> device_engine)
        : name(std::move(device_name)),
          engine(std::move(device_engine)),
          cost(engine->info().flops_per_second) {}
    const std::string name;  // "gpu0", "cpu"
    std::unique_ptr<Backend> engine;
    std::unique_ptr<MeteredBackend> backend;
    CostModel cost;
  };

  AttndServer(const ServerOptions& options, std::vector<std::unique_ptr<Backend>> engines,
              StagingPool staging, const Clock& clock, Logger& log);
  std::vector<const Backend*> Engines() const;
  absl::Status StartDevices();
  void StartWorkers();
  void LoseDevice(int device, const absl::Status& status);
  void SetDeviceServing(const Device& device, bool serving);
  void PlaceStaging();
  void StartGpuWatch();
  void SampleDevice(int number, const Device& device);
  void SampleDeviceMemory(int number, const Device& device);
  void SampleStreams(const Device& device);
  void SampleSharedMemory();
  void SampleCertificates();
  void SampleLeases(int place, const std::string& name);
  static bool WaitOut(absl::Duration time);
  bool WaitForBalancers(absl::Duration delay, const std::function<bool(absl::Duration)>& wait);
  bool WaitUntilCallersLeave(absl::Time deadline, const std::function<bool(absl::Duration)>& wait);
  bool WaitUntilAnswered(absl::Time deadline, const std::function<bool(absl::Duration)>& wait);
  absl::Status StartMetrics();
  void StartSharedMemory();
  // One for each listener.
  using Acceptors = std::vector<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>>;
  absl::Status StartGrpc();
  absl::StatusOr<Acceptors> OpenPorts(grpc::ServerBuilder& builder);
  void HoldWastefulPeers();
  void LimitReceiveMemory();
  void LimitConnections(grpc::ServerBuilder& builder);
  void ClosePorts();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Credentials(const std::string& address);
  void SampleState();
  void SetServing(bool serving);

  const ServerOptions options_;
  const Clock& clock_;
  Logger& log_;
  StagingPool staging_;
  Metrics metrics_;
  std::deque<Device> devices_;  // its engines have page-locked the staging memory: they go first
  std::atomic<int> lost_devices_{0};
  std::unique_ptr<SharedMemoryTable> shared_memory_;  // its regions are page-locked by an engine
  Authenticator auth_;
  std::unique_ptr<TokenWatch> token_watch_;              // null: no tokens
  std::unique_ptr<CertificateWatch> certificate_watch_;  // null: no TLS
  v1::GetServerInfoResponse server_info_;
  std::unique_ptr<LeaseTable> leases_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<ReplyThreads> reply_threads_;  // before the worker, which hands them replies
  std::unique_ptr<Workers> workers_;
  CallLogLimit log_limit_;
  std::unique_ptr<LeaseReaper> reaper_;
  std::unique_ptr<StreamWatch> stream_watch_;  // before the server, whose streams it knows
  std::vector<std::unique_ptr<SharedMemoryService>> shared_memory_services_;
  std::shared_ptr<HeldPeers> held_peers_;          // and their connections
  std::shared_ptr<ReceiveMemory> receive_memory_;  // likewise
  std::shared_ptr<ConnectionLimit> connections_;   // and gRPC, as long as it may accept
  OpenCalls open_calls_;
  std::unique_ptr<EventThreads> event_threads_;  // before the server, which they drive
  std::unique_ptr<AttentionService> service_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> certificates_;  // and gRPC
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<GpuWatch> gpu_watch_;
  std::vector<std::unique_ptr<TcpListener>> listeners_;  // hand over to the server
  std::unique_ptr<MetricsPort> metrics_port_;            // after what its gauges read
  std::vector<std::string> addresses_;
};

}  // namespace attnd
