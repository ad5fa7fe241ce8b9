// Logger: one line per event: time, severity, event, key=value fields, as text or JSON. Values are
// escaped, so that one event is always one line. Never tensor data, never tokens. Any thread.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

enum class Severity { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// One key and its value. Numbers and bools stay such in JSON.
struct LogField {
  template <class Value>
  LogField(absl::string_view key, const Value& value) : key(key) {
    if constexpr (std::is_same_v<Value, bool>) {
      text = value ? "true" : "false";
      bare = true;
    } else {
      text = absl::StrCat(value);
      bare = std::is_arithmetic_v<Value>;
    }
  }
  absl::string_view key;
  std::string text;
  bool bare = false;
};

// The line for an event, without its end of line. Exposed for tests.
std::string FormatLogLine(LogFormat format, absl::Time time, Severity severity,
                          absl::string_view event, std::initializer_list<LogField> fields);

class Logger {
 public:
  // `out` outlives the logger and is flushed after each line.
  Logger(std::FILE* out, LogFormat format, Severity least)
      : out_(out), format_(format), least_(least) {}

  bool Writes(Severity severity) const { return severity >= least_; }
  void Log(Severity severity, absl::string_view event, std::initializer_list<LogField> fields = {});
  void Info(absl::string_view event, std::initializer_list<LogField> fields = {}) {
    Log(Severity::kInfo, event, fields);
  }
  void Warning(absl::string_view event, std::initializer_list<LogField> fields = {}) {
    Log(Severity::kWarning, event, fields);
  }
  void Error(absl::string_view event, std::initializer_list<LogField> fields = {}) {
    Log(Severity::kError, event, fields);
  }

 private:
  absl::Mutex mutex_;
  std::FILE* const out_ ABSL_PT_GUARDED_BY(mutex_);
  const LogFormat format_;
  const Severity least_;
};

}  // namespace attnd
