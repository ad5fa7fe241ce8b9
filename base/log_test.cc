#include "base/log.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <limits>
#include <string>

#include "nlohmann/json.hpp"

namespace attnd {
namespace {

const absl::Time kTime = absl::UnixEpoch() + absl::Milliseconds(1500);

TEST(LogLine, IsKeyValueText) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, Severity::kInfo, "serving",
                          {{"port", 7070}, {"name", "a b"}, {"ok", true}, {"plain", "x"}}),
            "time=1970-01-01T00:00:01.500000Z severity=info event=serving port=7070 name=\"a b\" "
            "ok=true plain=x");
}

TEST(LogLine, IsOneLineWhateverAValueHolds) {
  std::string line = FormatLogLine(LogFormat::kText, kTime, Severity::kError, "e",
                                   {{"text", "a\nevent=forged \"q\" \x01"}, {"empty", ""}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_NE(line.find("text=\"a\\nevent=forged \\\"q\\\" \\001\" empty=\"\""), std::string::npos)
      << line;
}

TEST(LogLine, IsValidJsonWhateverAValueHolds) {
  std::string line = FormatLogLine(LogFormat::kJson, kTime, Severity::kWarning, "call",
                                   {{"n", 3},
                                    {"x", 1.5},
                                    {"nan", std::numeric_limits<double>::quiet_NaN()},
                                    {"bad", "\xff\"\n"},
                                    {"yes", true}});
  nlohmann::json json = nlohmann::json::parse(line);
  EXPECT_EQ(json["severity"], "warning");
  EXPECT_EQ(json["event"], "call");
  EXPECT_EQ(json["n"], 3);
  EXPECT_EQ(json["x"], 1.5);
  EXPECT_EQ(json["nan"], "nan");
  EXPECT_EQ(json["yes"], true);
  EXPECT_TRUE(json["bad"].is_string());
}

TEST(Logger, WritesWhatIsSevereEnough) {
  std::FILE* file = std::tmpfile();
  Logger log(file, LogFormat::kText, Severity::kWarning);
  log.Info("quiet");
  log.Warning("loud");
  std::rewind(file);
  char text[200] = {};
  size_t size = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  std::string written(text, size);
  EXPECT_EQ(written.find("quiet"), std::string::npos);
  EXPECT_NE(written.find("event=loud\n"), std::string::npos);
}

}  // namespace
}  // namespace attnd
