#include "server/app/grpc_log.h"

#include <grpc/support/log.h>

#include <cstdint>
#include <optional>

#include "absl/base/const_init.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "server/rpc/call_log_limit.h"

namespace attnd {
namespace {

struct Target {
  Logger& log;
  CallLogLimit limit;
};

// gRPC's hook is one function for the process, without an argument of ours.
ABSL_CONST_INIT absl::Mutex target_mutex(absl::kConstInit);
ABSL_CONST_INIT Target* target ABSL_GUARDED_BY(target_mutex) = nullptr;

// Most messages that gRPC logs as errors are caused by the peer.
Severity SeverityOf(gpr_log_severity severity) {
  if (severity == GPR_LOG_SEVERITY_ERROR) return Severity::kWarning;
  return severity == GPR_LOG_SEVERITY_INFO ? Severity::kInfo : Severity::kDebug;
}

void WriteLine(gpr_log_func_args* line) {
  absl::MutexLock lock(&target_mutex);
  Severity severity = SeverityOf(line->severity);
  if (target == nullptr || !target->log.Writes(severity)) return;
  std::optional<int64_t> left_out = target->limit.Take(absl::Now());
  if (!left_out.has_value()) return;
  absl::string_view file = line->file;
  target->log.Log(severity, "grpc",
                  {{"message", line->message},
                   {"source", absl::StrCat(file.substr(file.rfind('/') + 1), ":", line->line)},
                   {"lines_left_out", *left_out}});
}

}  // namespace

GrpcLog::GrpcLog(Logger& log) {
  absl::MutexLock lock(&target_mutex);
  CHECK(target == nullptr);
  target = new Target{log, {}};
  gpr_set_log_function(WriteLine);
}

GrpcLog::~GrpcLog() {
  absl::MutexLock lock(&target_mutex);
  gpr_set_log_function(nullptr);
  delete target;
  target = nullptr;
}

}  // namespace attnd
