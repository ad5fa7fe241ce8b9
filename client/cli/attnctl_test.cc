// The binary itself, against a fake server: what it prints and its exit codes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/shell.h"

namespace attnd {
namespace {

TEST(Attnctl, TellsItsVersionAndHelpsWithExamples) {
  Outcome version = RunAttnctl("--version");
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(absl::StartsWith(version.output, "attnctl 0.")) << version.output;
  Outcome help = RunAttnctl("--help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(help.output, "Exit codes:")) << help.output;
  for (const char* command : {"info", "health", "check", "bench", "estimate", "mask", "module",
                              "run", "top", "completion"}) {
    Outcome one = RunAttnctl(absl::StrCat(command, " --help"));
    EXPECT_EQ(one.exit_code, 0) << command;
    EXPECT_TRUE(absl::StrContains(help.output, absl::StrCat("  ", command, " "))) << command;
  }
}

TEST(Attnctl, RefusesATokenFileWithoutAToken) {
  Outcome empty = RunAttnctl("--token-file /dev/null info");
  EXPECT_EQ(empty.exit_code, 4);
  EXPECT_TRUE(absl::StrContains(empty.output, "--token-file: expected a token, got none"))
      << empty.output;
}

TEST(Attnctl, FailsWhenItsOutputIsLost) {
  EXPECT_EQ(RunAttnctl("--version > /dev/full").exit_code, 4);
  EXPECT_EQ(RunAttnctl("completion bash > /dev/full").exit_code, 4);
}

TEST(Attnctl, ExitsWithTwoForWrongUsageAndThreeWhenNobodyAnswers) {
  EXPECT_EQ(RunAttnctl("").exit_code, 2);
  Outcome nothing = RunAttnctl("nothing");
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(nothing.output, "no command nothing")) << nothing.output;
  EXPECT_EQ(RunAttnctl("info --no-such-flag").exit_code, 2);
  for (const auto& [typed, meant] : {std::pair("inf", "info"),
                                     {"bnech", "bench"},
                                     {"module lst", "list"},
                                     {"bench --causl", "--causal"},
                                     {"info --adress", "--address"}}) {
    const std::string text = RunAttnctl(typed).output;
    EXPECT_TRUE(absl::StrContains(text, absl::StrCat("did you mean ", meant, "?"))) << text;
  }
  EXPECT_FALSE(absl::StrContains(nothing.output, "did you mean")) << nothing.output;
  EXPECT_TRUE(absl::StrContains(RunAttnctl("module foo").output,
                                "no command foo; attnctl module --help lists them"));
  EXPECT_EQ(RunAttnctl("-o yaml info").exit_code, 2);
  EXPECT_EQ(RunAttnctl("bench --shape 1,2").exit_code, 2);
  EXPECT_EQ(RunAttnctl("bench --dtype int8").exit_code, 2);
  EXPECT_EQ(RunAttnctl("bench --concurrency-range 2:1").exit_code, 2);
  EXPECT_EQ(RunAttnctl("bench --export table.txt").exit_code, 2);
  EXPECT_EQ(RunAttnctl("--address , info").exit_code, 2);
  EXPECT_EQ(RunAttnctl("--address 127.0.0.1:1,localhost info").exit_code, 2);
  EXPECT_EQ(RunAttnctl("top --metrics ftp://127.0.0.1:1/").exit_code, 2);
  Outcome timeout = RunAttnctl("--timeout 0 info");
  EXPECT_EQ(timeout.exit_code, 2);
  EXPECT_LT(timeout.output.size(), 200) << timeout.output;
  EXPECT_EQ(RunAttnctl("module").exit_code, 2);
  EXPECT_EQ(RunAttnctl("module plan /no/such").exit_code, 4);
  for (const char* command : {"info", "health", "check", "bench", "module list"}) {
    Outcome outcome = RunAttnctl(absl::StrCat("--address 127.0.0.1:1 ", command));
    EXPECT_EQ(outcome.exit_code, 3) << outcome.output;
    EXPECT_TRUE(absl::StrContains(outcome.output, "UNAVAILABLE")) << outcome.output;
  }
  Outcome second = RunAttnctl("--address 127.0.0.1:1,127.0.0.1:2 health");
  EXPECT_TRUE(absl::StrContains(second.output, "a daemon listening on 127.0.0.1:2?"))
      << second.output;
  Outcome top = RunAttnctl("top --once --metrics http://127.0.0.1:1/");
  EXPECT_EQ(top.exit_code, 3);
  EXPECT_FALSE(absl::StrContains(top.output, "7070")) << top.output;  // not asked
  for (const char* in : {"/no/such", "/"}) {
    Outcome unread = RunAttnctl(absl::StrCat("run --in ", in, " --out /no/where"));
    EXPECT_EQ(unread.exit_code, 4);
    EXPECT_TRUE(absl::StrContains(unread.output, absl::StrCat("cannot read ", in)));
  }
}

TEST(Attnctl, PlansSegmentsOfAModelWithoutADaemon) {
  using Json = nlohmann::json;
  const Outcome told =
      RunAttnctl("--address 127.0.0.1:1 -o json module plan bert-base --rows 512,4096");
  ASSERT_EQ(told.exit_code, 0) << told.output;
  const Json plan = Json::parse(told.output);
  EXPECT_EQ(plan["gpu"], "h100");
  ASSERT_EQ(plan["plans"].size(), 4);  // two numbers of rows, two directions
  const Json& forward = plan["plans"][2];
  EXPECT_EQ(forward["rows"], 4096);
  EXPECT_EQ(forward["direction"], "forward");
  // Twice a sum with its norm, and a product of four times as many numbers with gelu.
  EXPECT_EQ(forward["launches_saved"], 3);
  EXPECT_EQ(forward["bytes_saved"], (2 + 4) * 4096.0 * 768 * 2);
  EXPECT_EQ(forward["segments"][5]["ops"], (Json{"binary", "norm"}));
  EXPECT_EQ(forward["segments"][5]["template"], "rows");
  EXPECT_LT(plan["plans"][0]["bound_us"], forward["bound_us"]);
  const Outcome table = RunAttnctl("module plan llama-1b --gpu v100");
  EXPECT_EQ(table.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(table.output, "activation + binary")) << table.output;
  EXPECT_EQ(RunAttnctl("module plan bert-base --rows 0").exit_code, 2);
  EXPECT_EQ(RunAttnctl("module plan bert-base --rows x").exit_code, 2);
  const Outcome gpu = RunAttnctl("module plan bert-base --gpu k80");
  EXPECT_EQ(gpu.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(gpu.output, "--gpu: expected v100, a100, h100, h200, got k80"));
  EXPECT_EQ(RunAttnctl("module plan /no/such --rows 512").exit_code, 4);
}

TEST(Attnctl, TellsWhichFlagIsOfTheWrongKind) {
  const Outcome seed = RunAttnctl("check --seed two"), channels = RunAttnctl("--channels 5s info");
  EXPECT_EQ(seed.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(seed.output, "--seed = two\n")) << seed.output;
  EXPECT_EQ(channels.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(channels.output, "--channels: Value 5s not in range"))
      << channels.output;
}

TEST(Attnctl, TellsOfAWrongProblemFlagBeforeItReadsAFile) {
  Outcome dropout = RunAttnctl("run --in /no/such --out /no/where --dropout 1");
  EXPECT_EQ(dropout.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(dropout.output, "--dropout: expected 0 to below 511/512, got 1"))
      << dropout.output;
}

TEST(Attnctl, RunsIntoAnotherFileThanItsInput) {
  const std::string in = absl::StrCat(testing::TempDir(), "/run_in");
  std::ofstream(in) << "tensors";
  std::filesystem::create_hard_link(in, in + "_linked");
  for (const std::string& out : {in, in + "_linked"}) {
    Outcome outcome = RunAttnctl(absl::StrCat("run --in ", in, " --out ", out));
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_TRUE(absl::StrContains(outcome.output, "--out: expected another file than --in, got "))
        << outcome.output;
  }
  std::string kept;
  std::ifstream(in) >> kept;
  EXPECT_EQ(kept, "tensors");
}

TEST(Attnctl, ChecksAServerAndFindsAWrongOne) {
  FakeServer server("127.0.0.1:0");
  std::string at = absl::StrCat("--address ", server.address());
  Outcome good = RunAttnctl(at + " check --count 20 --max-size 256 --max-head-dim 16");
  EXPECT_EQ(good.exit_code, 0) << good.output;
  EXPECT_TRUE(absl::StrContains(good.output, "verdict")) << good.output;
  EXPECT_EQ(good.output.find('\033'), std::string::npos) << "colour without a terminal";
  server.CorruptReplies();
  Outcome bad = RunAttnctl(at + " -o json check --count 20 --max-size 256 --max-head-dim 16");
  EXPECT_EQ(bad.exit_code, 1);
  auto json = nlohmann::json::parse(bad.output);
  EXPECT_FALSE(json["failures"].empty());
}

TEST(Attnctl, BenchesWithItsEnvironmentInTheJson) {
  FakeServer server("127.0.0.1:0");
  Outcome outcome = RunAttnctl(absl::StrCat("bench --address ", server.address(),
                                            " --shape 1,1,8,8 --duration 0.2 --warmup 0 -o json"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["environment"]["server"], "fake");
  EXPECT_GT(json["rows"][0]["calls"], 0);
  EXPECT_GT(json["rows"][0]["latency_seconds"]["p50"], 0);
}

// docs/WHEN.md: 2 cores of Zen 4, a simulated V100, head_dim 64.
TEST(Attnctl, EstimatesWhetherSendingPaysOff) {
  const char* flags = "estimate --shape 1,1,4096,64 --round-trip-us 0 --remote-tflops 70.1 -o json";
  auto estimate = [&](const char* more) {
    return nlohmann::json::parse(RunAttnctl(absl::StrCat(flags, " ", more)).output);
  };
  const nlohmann::json ten = estimate("--link-gbit 10 --local-tflops 0.174");
  EXPECT_NEAR(ten["gain"], 29, 0.5);
  EXPECT_NEAR(ten["pays_off_from_length"], 130, 1);
  EXPECT_NEAR(estimate("--link-gbit 100 --local-tflops 0.174")["gain"], 177, 2);
  EXPECT_NEAR(estimate("--link-gbit 10 --local-tflops 0.174 --no-leases")["pays_off_from_length"],
              130 * 4 / 3, 2);
  EXPECT_FALSE(estimate("--link-gbit 10 --local-tflops 80").contains("pays_off_from_length"));
  EXPECT_FALSE(estimate("--link-gbit 10").contains("gain"));
  EXPECT_EQ(RunAttnctl("--address 127.0.0.1:1 estimate").exit_code, 3);  // asks the daemon
  EXPECT_EQ(RunAttnctl("estimate --remote-tflops 70").exit_code, 2);
  EXPECT_EQ(RunAttnctl("estimate --link-gbit 0").exit_code, 2);
}

TEST(Attnctl, EstimateSaysInWordsWhatItAssumesAndFinds) {
  const std::string slower =
      RunAttnctl("estimate --shape 1,1,512,64 --link-gbit 10 --local-tflops 5.6").output;
  for (const char* words : {"assumed", "1.07 GiB/s", "70.0 TFLOP/s", "100 us", "5.60 TFLOP/s",
                            "sending is", "slower: ", " times"}) {
    EXPECT_TRUE(absl::StrContains(slower, words)) << words << "\n" << slower;
  }
  const std::string faster =
      RunAttnctl("estimate --shape 1,1,8192,64 --link-gbit 100 --local-tflops 0.1").output;
  EXPECT_TRUE(absl::StrContains(faster, "faster: ")) << faster;
}

TEST(Attnctl, EstimatesOffloadedLayers) {
  const std::string flags = "estimate --module bert-base --rows 1,512 --link-gbit 10 -o json";
  const auto base = nlohmann::json::parse(RunAttnctl(flags).output);
  EXPECT_EQ(base["bytes"], 4 * 512 * 768 * 2);  // x, y, dy and dx
  // Each weight has 16 bytes, and a copy in float16.
  EXPECT_GT(base["device_bytes"].get<double>(), 18 * 84.9e6);
  EXPECT_LT(base["device_bytes"].get<double>(), 18 * 84.9e6 + 512 * 400e3);
  // 12 layers: 84.9 million weights, and attention of 12 heads.
  EXPECT_NEAR(base["flops"].get<double>(), 3 * 2 * 512 * 84.9e6 + 3.5 * 12 * 4 * 512 * 512 * 768,
              1e9);
  const auto half = nlohmann::json::parse(RunAttnctl(flags + " --layers 6").output);
  EXPECT_NEAR(half["flops"].get<double>(), base["flops"].get<double>() / 2, 1e9);
  EXPECT_EQ(RunAttnctl("estimate --module bert-base").exit_code, 2);  // without a link
  EXPECT_EQ(RunAttnctl(flags + " --shape 1,1,64,64").exit_code, 2);
}

TEST(Attnctl, BenchPrintsItsFinishedRowsWhenInterrupted) {
  FakeServer server(absl::StrCat("unix:/tmp/attnctl_test_", getpid()));
  // In the foreground, since timeout otherwise sends the signal twice: the second ends it at once.
  const Outcome bench = RunShell(absl::StrCat(
      "timeout --foreground --preserve-status -s INT 6 client/attnctl --address "
      "unix:/tmp/attnctl_test_",
      getpid(),
      " bench --shape 1,1,2,4 --warmup 0 --duration 0.1 --concurrency-range 1:100 -o json"));
  EXPECT_EQ(bench.exit_code, 130) << bench.output;
  EXPECT_TRUE(absl::StrContains(bench.output, "\"callers\"")) << bench.output;
}

TEST(Attnctl, PrintsJsonWhateverBytesANameHolds) {
  const std::string path = absl::StrCat("/tmp/attnctl_test_", getpid(), "_\xff");  // at most 107
  FakeServer server(absl::StrCat("unix:", path));
  Outcome outcome = RunAttnctl(absl::StrCat("-o json --address 'unix:", path, "' info"));
  auto json = nlohmann::json::parse(outcome.output, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(json.is_discarded()) << outcome.output;
  EXPECT_EQ(json[0]["version"], "fake");
}

TEST(Attnctl, TellsErrorsAsJsonWhereJsonIsAskedFor) {
  const Outcome outcome = RunAttnctl("bench -o json --address 127.0.0.1:1");
  EXPECT_EQ(outcome.exit_code, 3);
  const auto json = nlohmann::json::parse(outcome.output, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(json.is_discarded()) << outcome.output;
  EXPECT_EQ(json["error"]["code"], "UNAVAILABLE");
  EXPECT_EQ(json["error"]["address"], "127.0.0.1:1");
  EXPECT_NE(json["error"]["message"], "");
}

}  // namespace
}  // namespace attnd
