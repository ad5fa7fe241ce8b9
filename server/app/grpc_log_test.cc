#include "server/app/grpc_log.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "server/rpc/call_log_limit.h"

namespace attnd {
namespace {

// Returns what is written to a log while `work` runs, one entry a line.
template <class Work>
std::vector<std::string> LinesOf(Work work) {
  grpc_init();  // before it gRPC writes nothing
  char* text = nullptr;
  size_t size = 0;
  std::FILE* out = open_memstream(&text, &size);
  Logger log(out, LogFormat::kJson, Severity::kInfo);
  {
    GrpcLog grpc_log(log);
    work();
  }
  grpc_shutdown();
  std::fclose(out);
  std::vector<std::string> lines = absl::StrSplit(std::string(text, size), '\n', absl::SkipEmpty());
  std::free(text);
  return lines;
}

TEST(GrpcLog, WritesGrpcsLinesInTheLogsFormat) {
  std::vector<std::string> lines = LinesOf([] {
    gpr_log_message("a/b/x.cc", 7, GPR_LOG_SEVERITY_ERROR, "handshake \"failed\"\nwith two lines");
    gpr_log_message("x.cc", 8, GPR_LOG_SEVERITY_DEBUG, "of no interest");
  });
  ASSERT_EQ(lines.size(), 1u);
  auto line = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(line["event"], "grpc");
  EXPECT_EQ(line["severity"], "warning");
  EXPECT_EQ(line["message"], "handshake \"failed\"\nwith two lines");
  EXPECT_EQ(line["source"], "x.cc:7");
}

TEST(GrpcLog, LeavesLinesOutWhenThereAreTooMany) {
  std::vector<std::string> lines = LinesOf([] {
    for (int n = 0; n < 1000; ++n) gpr_log_message("x.cc", n, GPR_LOG_SEVERITY_ERROR, "again");
  });
  EXPECT_GE(lines.size(), 1u);
  EXPECT_LT(lines.size(), 3 * CallLogLimit::kLinesPerSecond);  // the second may change twice
}

}  // namespace
}  // namespace attnd
