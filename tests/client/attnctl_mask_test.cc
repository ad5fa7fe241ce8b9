// attnctl's commands about masks against real daemons: the report and its picture, the check of all
// kinds, and the benchmark beside no mask.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/shell.h"

namespace attnd {
namespace {

std::string At(const Daemon& daemon) { return absl::StrCat("--address ", daemon.address()); }

// Computes as if a backward had no mask.
class Forgetful final : public Backend {
 public:
  const BackendInfo& info() const override { return reference_.info(); }
  absl::Status Supports(const Problem& p, Direction d) const override {
    return reference_.Supports(p, d);
  }
  int64_t WorkspaceBytes(const Problem& p, Direction d) const override {
    return reference_.WorkspaceBytes(p, d);
  }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    return reference_.Forward(calls);
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    std::vector<Problem> problems;
    std::vector<BackwardCall> unmasked(calls.begin(), calls.end());
    problems.reserve(calls.size());
    for (BackwardCall& call : unmasked) {
      problems.push_back(*call.problem);
      problems.back().mask = nullptr;
      call.problem = &problems.back();
    }
    return reference_.Backward(unmasked);
  }

 private:
  ReferenceBackend reference_;
};

TEST(AttnctlMask, ShowsTheDaemonsReportAndAPicture) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const Outcome table =
      RunAttnctl(At(daemon) + " mask 'longformer(64,64)' --shape 1,2,2048,64 --dtype float32");
  EXPECT_EQ(table.exit_code, 0) << table.output;
  for (const char* part :
       {"mask longformer(64,64), id ", " rows see nothing", "cpu_forward_float32_listed",
        "cpu_backward_float32_listed", "64x64", "cpu: lists of tiles: ",
        "\n################################################################\n", "\n##."}) {
    EXPECT_TRUE(absl::StrContains(table.output, part)) << part << "\n" << table.output;
  }
  const Outcome here = RunAttnctl("-o json mask 'causal & window(63,0)' --shape 2,1,128,8 --local");
  const Outcome there =
      RunAttnctl(At(daemon) + " -o json mask 'causal & window(63,0)' --shape 2,1,128,8");
  EXPECT_EQ(here.exit_code, 0) << here.output;
  const auto a = nlohmann::json::parse(here.output), b = nlohmann::json::parse(there.output);
  for (const char* field : {"id", "visible", "density", "empty_rows", "bytes_held"}) {
    EXPECT_EQ(a[field], b[field]) << field;
  }
  EXPECT_EQ(a["visible"], 2 * (64 * 128 - 64 * 63 / 2));
  EXPECT_EQ(a["devices"][0]["tiles_partial"], b["devices"][0]["tiles_partial"]);
  EXPECT_EQ(b["devices"][0]["kernel_forward"], "cpu_forward_float32_listed");
}

TEST(AttnctlMask, WritesAPicture) {
  const std::string path = absl::StrCat(testing::TempDir(), "/attnctl_mask.png");
  const Outcome outcome =
      RunAttnctl("mask 'bigbird(64,64,3)' --local --shape 1,1,4096,64 --png " + path);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_GT(std::filesystem::file_size(path), 1000u);
  EXPECT_EQ(RunAttnctl("mask causal --local --png /no/such/folder/x.png").exit_code, 4);
}

TEST(AttnctlMask, TellsWhatIsWrongWithASpelling) {
  const Outcome windw = RunAttnctl("mask 'causal & windw(1,2)' --local");
  EXPECT_EQ(windw.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(windw.output, "mask: character 10: expected a mask (all, "))
      << windw.output;
  const Outcome bench = RunAttnctl("bench --mask 'window(1,'");
  EXPECT_EQ(bench.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(bench.output,
                                "--mask: character 10: expected an argument of "
                                "window(left,right), got the end"))
      << bench.output;
  const Outcome diagonal = RunAttnctl("mask causal --local --kv-len 2048");
  EXPECT_EQ(diagonal.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(diagonal.output, "top_left, bottom_right or offsets"))
      << diagonal.output;
  const Outcome batch = RunAttnctl("mask 'prefix(1,2,3)' --local --shape 2,1,8,8");
  EXPECT_EQ(batch.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(batch.output, "prefix.len: expected 1 or batch = 2 entries"))
      << batch.output;
  EXPECT_EQ(RunAttnctl("--address 127.0.0.1:1 mask causal").exit_code, 3);
}

TEST(AttnctlMask, ChecksAllKindsAndFindsAMaskForgotten) {
  Daemon right(MakeCpuBackend({.threads = 1}));
  const Outcome good =
      RunAttnctl(At(right) + " check --mask --count 150 --max-size 1024 --max-head-dim 16");
  EXPECT_EQ(good.exit_code, 0) << good.output;
  for (const char* kind : {"mask: window", "mask: random blocks", "mask: blocks",
                           "mask: hidden rows", "mask: progressions", "mask: intervals",
                           "mask: rectangles", "mask: bits", "mask: per head"}) {
    EXPECT_TRUE(absl::StrContains(good.output, kind)) << kind << "\n" << good.output;
  }
  Daemon wrong(std::make_unique<Forgetful>());
  const Outcome bad =
      RunAttnctl(At(wrong) + " check --mask --count 20 --max-size 1024 --max-head-dim 16");
  EXPECT_EQ(bad.exit_code, 1) << bad.output;
  EXPECT_TRUE(absl::StrContains(bad.output, "WRONG")) << bad.output;
  const Outcome without =
      RunAttnctl(At(wrong) + " check --count 20 --max-size 1024 --max-head-dim 16");
  EXPECT_EQ(without.exit_code, 0) << without.output;
}

TEST(AttnctlMask, ChecksTheOneThatIsSpelled) {
  const std::string flags =
      " check --count 30 --max-size 1024 --max-head-dim 16 --mask '~window(2,0) | causal'";
  Daemon right(MakeCpuBackend({.threads = 1}));
  const Outcome good = RunAttnctl(At(right) + flags);
  EXPECT_EQ(good.exit_code, 0) << good.output;
  EXPECT_TRUE(absl::StrContains(good.output, "30 problems")) << good.output;
  EXPECT_TRUE(absl::StrContains(good.output, "mask: window")) << good.output;
  EXPECT_FALSE(absl::StrContains(good.output, "mask: bits")) << good.output;
  Daemon wrong(std::make_unique<Forgetful>());
  const Outcome bad = RunAttnctl(At(wrong) + " check --count 20 --mask 'window(0,0)'");
  EXPECT_EQ(bad.exit_code, 1) << bad.output;
  const Outcome unknown = RunAttnctl(At(right) + " check --mask windw");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(unknown.output, "--mask: character 1: expected a mask (all,"))
      << unknown.output;
  const Outcome misfit = RunAttnctl(At(right) + " check --mask 'documents(100000)'");
  EXPECT_EQ(misfit.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(misfit.output, "--mask: character 11: expected an integer 1.."))
      << misfit.output;
}

TEST(AttnctlMask, BenchesAMaskBesideNone) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const std::string flags =
      " bench --shape 1,2,1024,32 --mask 'window(63,0)' --direction both --duration 0.3 --warmup 0";
  const Outcome table = RunAttnctl(At(daemon) + flags);
  EXPECT_EQ(table.exit_code, 0) << table.output;
  EXPECT_TRUE(absl::StrContains(table.output, "% of the scores are visible")) << table.output;
  EXPECT_TRUE(absl::StrContains(table.output, "times as fast as without the mask")) << table.output;
  const Outcome outcome = RunAttnctl(At(daemon) + " -o json" + flags);
  const auto json = nlohmann::json::parse(outcome.output);
  ASSERT_EQ(json["rows"].size(), 4) << outcome.output;
  EXPECT_NEAR(json["mask"]["visible_share"], 64.0 / 1024, 0.003);
  EXPECT_NEAR(json["mask"]["visited_share"], 31.0 / 256, 1e-9);  // tiles of 64: 16 + 15
  const double dense = json["rows"][0]["latency_seconds"]["p50"];
  const double masked = json["rows"][2]["latency_seconds"]["p50"];
  EXPECT_EQ(json["rows"][0]["mask"], false);
  EXPECT_EQ(json["rows"][2]["mask"], true);
  EXPECT_EQ(json["rows"][2]["direction"], "forward");
  EXPECT_LT(masked, dense);  // the mask is sent, and tiles are skipped
}

}  // namespace
}  // namespace attnd
