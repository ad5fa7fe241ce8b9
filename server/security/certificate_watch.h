// CertificateWatch: what gRPC reads of --tls_cert, --tls_key and --tls_client_ca. gRPC watches
// files by itself, but serves whatever they hold: a half-written certificate, or one renewed before
// its key, would fail every handshake. So gRPC watches copies in memory, which change when all
// files are right together (CheckTlsFiles); until then the old ones stay, and the log says why,
// once.
//
// Threads: it has one of its own; Look may be called from any.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/log.h"
#include "base/periodic.h"
#include "server/security/tls_options.h"

namespace attnd {

class CertificateWatch {
 public:
  // Errors as of CheckTlsFiles, RESOURCE_EXHAUSTED without descriptors. `log` outlives this.
  static absl::StatusOr<std::unique_ptr<CertificateWatch>> Start(const TlsOptions& files,
                                                                 Logger& log);

  void Look();  // now

  // The files' copies. They stay until the process ends, since gRPC may look at them until then.
  const TlsOptions& copies() const { return copies_; }
  bool wants_client_certificates() const { return !files_.client_ca.empty(); }

 private:
  CertificateWatch(const TlsOptions& files, Logger& log) : files_(files), log_(log) {}
  absl::Status Update() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Warns, once, when what is served is not valid yet or any more.
  void CheckTimes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const TlsOptions files_;
  Logger& log_;
  TlsOptions copies_;
  absl::Mutex mutex_;
  std::array<std::string, 3> contents_ ABSL_GUARDED_BY(mutex_);  // of the copies
  std::string last_fault_ ABSL_GUARDED_BY(mutex_);
  std::string last_time_fault_ ABSL_GUARDED_BY(mutex_);
  std::optional<Periodic> looks_;
};

}  // namespace attnd
