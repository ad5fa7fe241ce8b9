// AttndServer: the daemon's parts, built in the order of the arrow and taken down in reverse. main
// owns one; tests build it in-process with an engine and options of their own.
//
//   Start        devices checked → leases, admission, workers → metrics port → gRPC → SERVING
//   a device     is fenced (no new calls), its calls fail, and the server is NOT_SERVING: the owner
//   is lost      drains it (other devices finish) and ends the process
//   Drain        NOT_SERVING, still takes calls for `delay` while it has a device; then refuses new
//                ones (DRAINING) until none has come for a while, closes the ports, and finishes
//                what runs; all of it within `timeout`. gRPC cancels a call that arrives while it
//                closes, so it closes when callers have left, or after three seconds at most.
//                Watchers of health do not hold it up.
// Any thread may ask for addresses; Start and Drain by one.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/device.h"
#include "server/admission/admission.h"
#include "server/admission/staging_pool.h"
#include "server/app/devices.h"
#include "server/app/options.h"
#include "server/keep/lease_table.h"
#include "server/keep/mask_table.h"
#include "server/metrics/metrics.h"
#include "server/security/auth.h"
#include "server/shared_memory/shared_memory.h"

namespace attnd {

// Tests read this header often: their parts' own, and gRPC's, are long.
class Calls;
class CertificateWatch;
class Keep;
class MetricsPort;
class Modules;
struct NamedEngine;
class RpcServer;
class SharedMemoryService;
class TokenWatch;

class AttndServer {
 public:
  // `options` have passed CheckOptions. Errors: what the startup check, the files or the ports say.
  // `clock` and `log` outlive the server.
  static absl::StatusOr<std::unique_ptr<AttndServer>> Start(const ServerOptions& options,
                                                            Device device, const Clock& clock,
                                                            Logger& log);
  // Several devices, at least one.
  static absl::StatusOr<std::unique_ptr<AttndServer>> Start(const ServerOptions& options,
                                                            std::vector<Device> devices,
                                                            const Clock& clock, Logger& log);
  ~AttndServer();

  // As bound: a port of 0 has become the real one. In the order of options.listen.
  const std::vector<std::string>& addresses() const;
  int metrics_port() const;
  AdmissionUse use() const;
  AdmissionDeviceUse use(int device) const;
  int64_t call_bytes() const;  // of calls beside their tensors
  int64_t staging_used() const { return staging_.used(); }
  LeaseUse leases() const;
  LeaseUse leases(int place) const;
  MaskTableStats masks() const;
  int connections() const;
  // Whether a device has been lost: time to drain and to end the process.
  bool device_lost() const { return devices_.any_lost(); }
  bool all_devices_lost() const { return devices_.all_lost(); }
  // OK while the process works, draining or not; else what is stuck and will not end by itself, so
  // that only a restart helps. Any thread.
  absl::Status CheckAlive() const;
  int64_t module_bytes() const;
  SharedMemoryUse shared_memory_use() const { return shared_memory_->Use(); }

  // Returns when every call is answered or `timeout` has passed (what then still runs is
  // cancelled). `wait(delay)` waits; it returns false to cut the drain short, as a second SIGTERM
  // does.
  void Drain(absl::Duration delay, absl::Duration timeout,
             const std::function<bool(absl::Duration)>& wait = WaitOut);
  // Without the courtesy: cancels what runs.
  void StopNow();

 private:
  AttndServer(const ServerOptions& options, std::vector<Device> devices, StagingPool staging,
              const Clock& clock, Logger& log);
  absl::Status StartSecurity();
  void StartCalls(const TokenIssuer& issuer);
  void StartSharedMemory();
  absl::Status StartModules(const TokenIssuer& issuer);
  absl::Status StartMetrics();
  absl::Status StartRpc();
  void LoseDevice(int device, const absl::Status& status);
  void SetServing(bool serving);
  void SetDeviceServing(int device, bool serving);

  void SampleState();
  void SampleDevice(int number);
  void SampleLeases(int place, const std::string& name);
  void SampleSharedMemory();
  void SampleMasks();
  void SampleCaptures();
  void SampleModules();
  void SampleCertificates();

  static bool WaitOut(absl::Duration time);
  bool WaitForBalancers(absl::Duration delay, const std::function<bool(absl::Duration)>& wait);
  bool WaitUntilCallersLeave(absl::Time deadline, const std::function<bool(absl::Duration)>& wait);
  bool WaitUntilAnswered(absl::Time deadline, const std::function<bool(absl::Duration)>& wait);

  // Each uses those above it, and is gone before them.
  const ServerOptions options_;
  const Clock& clock_;
  Logger& log_;
  StagingPool staging_;
  Metrics metrics_;
  Devices devices_;
  std::unique_ptr<SharedMemoryTable> shared_memory_;
  Authenticator auth_;
  std::unique_ptr<TokenWatch> token_watch_;              // null: no tokens
  std::unique_ptr<CertificateWatch> certificate_watch_;  // null: no TLS
  v1::GetServerInfoResponse server_info_;
  std::unique_ptr<Keep> keep_;
  std::unique_ptr<Calls> calls_;
  std::unique_ptr<Modules> modules_;  // null: none are served
  std::vector<NamedEngine> named_engines_;
  std::vector<std::unique_ptr<SharedMemoryService>> shared_memory_services_;
  std::atomic<bool> started_{false};  // all parts are there
  std::atomic<bool> serving_{false};  // to all callers, as health says
  std::unique_ptr<MetricsPort> metrics_port_;
  std::unique_ptr<RpcServer> rpc_;
};

}  // namespace attnd
