// AttndServer: the daemon's parts, built in the order of the arrow and taken down in reverse. main
// owns one; tests build it in-process with an engine and options of their own.
//
//   Start        engine self-test → pools → worker → metrics port → gRPC ports → SERVING
//   Drain        NOT_SERVING, still takes calls for `delay`; then refuses new ones (DRAINING) until
//                none has come for a while, closes the ports, and finishes what runs; all of it
//                within `timeout`. gRPC cancels a call that arrives while it closes, so it closes
//                only when callers have left.
// Any thread may ask for addresses; Start and Drain by one.
#pragma once

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/server.h>
#include <prometheus/exposer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/backend.h"
#include "server/admission.h"
#include "server/auth.h"
#include "server/cost_model.h"
#include "server/device_worker.h"
#include "server/lease_reaper.h"
#include "server/lease_table.h"
#include "server/metered_backend.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/reply_threads.h"
#include "server/service.h"
#include "server/staging_pool.h"

namespace attnd {

class AttndServer {
 public:
  // `options` have passed CheckOptions. Errors: what the self test, the files or the ports say.
  // `clock` and `log` outlive the server.
  static absl::StatusOr<std::unique_ptr<AttndServer>> Start(const ServerOptions& options,
                                                            std::unique_ptr<Backend> backend,
                                                            const Clock& clock, Logger& log);
  ~AttndServer();

  // As bound: a port of 0 has become the real one. In the order of options.listen.
  const std::vector<std::string>& addresses() const { return addresses_; }
  int metrics_port() const { return metrics_port_; }  // 0: none
  AdmissionUse use() const { return admission_->Use(); }
  int64_t staging_used() const { return staging_.used(); }
  LeaseUse leases() const { return leases_->Use(); }

  // Returns when every call is answered or `timeout` has passed (what then still runs is
  // cancelled). `wait(delay)` waits; it returns false to cut the drain short, as a second SIGTERM
  // does.
  void Drain(absl::Duration delay, absl::Duration timeout,
             const std::function<bool(absl::Duration)>& wait = WaitOut);
  // Without the courtesy: cancels what runs.
  void StopNow();

 private:
  AttndServer(const ServerOptions& options, std::unique_ptr<Backend> backend, StagingPool staging,
              const Clock& clock, Logger& log);
  static bool WaitOut(absl::Duration time);
  bool WaitUntilCallersLeave(absl::Time deadline, const std::function<bool(absl::Duration)>& wait);
  absl::Status StartMetrics();
  absl::Status StartGrpc();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Credentials(const std::string& address);
  void SampleState();
  void SetServing(bool serving);

  const ServerOptions options_;
  const Clock& clock_;
  Logger& log_;
  std::unique_ptr<Backend> engine_;
  Metrics metrics_;
  std::unique_ptr<MeteredBackend> backend_;
  CostModel cost_;
  StagingPool staging_;
  Authenticator auth_;
  v1::GetServerInfoResponse server_info_;
  std::unique_ptr<LeaseTable> leases_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<ReplyThreads> reply_threads_;  // before the worker, which hands them replies
  std::unique_ptr<DeviceWorker> worker_;
  CallLogLimit log_limit_;
  std::unique_ptr<LeaseReaper> reaper_;
  std::unique_ptr<StreamWatch> stream_watch_;  // before the server, whose streams it knows
  std::unique_ptr<AttentionService> service_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> certificates_;  // and gRPC
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<prometheus::Exposer> exposer_;  // after what its gauges read
  std::vector<std::string> addresses_;
  int metrics_port_ = 0;
};

}  // namespace attnd
