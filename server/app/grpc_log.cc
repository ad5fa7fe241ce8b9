#include "server/app/grpc_log.h"

#include <grpc/support/log.h>

#include <cstdint>
#include <optional>

#include "absl/base/const_init.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/clock.h"
#include "server/rpc/call_log_limit.h"

// Since it has no GPR_ASSERT gRPC logs with abseil.
#ifndef GPR_ASSERT
#include "absl/log/globals.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#endif

namespace attnd {
namespace {

struct Target {
  Logger& log;
  CallLogLimit limit;
};

// gRPC's hook is one for the process, without an argument of ours.
ABSL_CONST_INIT absl::Mutex target_mutex(absl::kConstInit);
ABSL_CONST_INIT Target* target ABSL_GUARDED_BY(target_mutex) = nullptr;

void WriteLine(Severity severity, absl::string_view message, absl::string_view file, int line) {
  absl::MutexLock lock(&target_mutex);
  if (target == nullptr || !target->log.Writes(severity)) return;
  std::optional<int64_t> left_out = target->limit.Take(SteadyNow());
  if (!left_out.has_value()) return;
  target->log.Log(severity, "grpc",
                  {{"message", message},
                   {"source", absl::StrCat(file.substr(file.rfind('/') + 1), ":", line)},
                   {"lines_left_out", *left_out}});
}

// Most messages that gRPC logs as errors are caused by the peer.
#ifdef GPR_ASSERT

void WriteMessage(gpr_log_func_args* args) {
  Severity severity = Severity::kDebug;
  if (args->severity == GPR_LOG_SEVERITY_ERROR) severity = Severity::kWarning;
  if (args->severity == GPR_LOG_SEVERITY_INFO) severity = Severity::kInfo;
  WriteLine(severity, args->message, args->file, args->line);
}

void Hook() { gpr_set_log_function(WriteMessage); }
void Unhook() { gpr_set_log_function(nullptr); }

#else

class Sink : public absl::LogSink {
 public:
  void Send(const absl::LogEntry& entry) override {
    Severity severity = Severity::kWarning;
    if (entry.log_severity() == absl::LogSeverity::kInfo) {
      severity = entry.verbosity() > 0 ? Severity::kDebug : Severity::kInfo;
    }
    WriteLine(severity, entry.text_message(), entry.source_filename(), entry.source_line());
  }
};

Sink& OnlySink() {
  static auto* sink = new Sink;
  return *sink;
}

void Hook() {
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfinity);
  absl::AddLogSink(&OnlySink());
}
void Unhook() {
  absl::RemoveLogSink(&OnlySink());
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kError);
}

#endif

}  // namespace

GrpcLog::GrpcLog(Logger& log) {
  absl::MutexLock lock(&target_mutex);
  CHECK(target == nullptr);
  target = new Target{log, {}};
  Hook();
}

GrpcLog::~GrpcLog() {
  Unhook();
  absl::MutexLock lock(&target_mutex);
  delete target;
  target = nullptr;
}

}  // namespace attnd
