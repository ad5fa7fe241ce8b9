#include "base/log.h"

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"

namespace attnd {
namespace {

absl::string_view SeverityName(Severity severity) {
  constexpr absl::string_view kNames[] = {"debug", "info", "warning", "error"};
  return kNames[static_cast<int>(severity)];
}

// Bytes that are not UTF-8 are replaced, so that the line is always valid JSON.
std::string JsonString(absl::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool NeedsQuotes(absl::string_view text) {
  if (text.empty()) return true;
  for (char c : text) {
    if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == 127) return true;
  }
  return false;
}

std::string TextValue(const LogField& field) {
  if (field.bare || !NeedsQuotes(field.text)) return field.text;
  return absl::StrCat("\"", absl::Utf8SafeCEscape(field.text), "\"");
}

bool IsJsonNumber(const LogField& field) {
  return field.bare && field.text != "nan" && field.text != "inf" && field.text != "-inf";
}

}  // namespace

std::string FormatLogLine(LogFormat format, absl::Time time, Severity severity,
                          absl::string_view event, std::initializer_list<LogField> fields) {
  std::string when = absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone());
  if (format == LogFormat::kText) {
    std::string line =
        absl::StrCat("time=", when, " severity=", SeverityName(severity), " event=", event);
    for (const LogField& field : fields)
      absl::StrAppend(&line, " ", field.key, "=", TextValue(field));
    return line;
  }
  std::string line = absl::StrCat("{\"time\":\"", when, "\",\"severity\":\"",
                                  SeverityName(severity), "\",\"event\":", JsonString(event));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, ",", JsonString(field.key), ":",
                    IsJsonNumber(field) ? field.text : JsonString(field.text));
  }
  return absl::StrCat(line, "}");
}

void Logger::Log(Severity severity, absl::string_view event,
                 std::initializer_list<LogField> fields) {
  if (!Writes(severity)) return;
  std::string line = FormatLogLine(format_, absl::Now(), severity, event, fields);
  line.push_back('\n');
  absl::MutexLock lock(&mutex_);
  std::fwrite(line.data(), 1, line.size(), out_);
  std::fflush(out_);
}

}  // namespace attnd
