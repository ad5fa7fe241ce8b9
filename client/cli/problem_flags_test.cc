#include "client/cli/problem_flags.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "CLI/CLI.hpp"

namespace attnd {
namespace {

// The problem that a command line and a file's metadata make.
absl::StatusOr<Problem> Parsed(std::vector<std::string> arguments,
                               const std::map<std::string, std::string>& metadata = {}) {
  CLI::App app;
  ProblemFlags flags;
  flags.AddTo(app);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  absl::Status status = flags.Merge(metadata);
  if (!status.ok()) return status;
  Problem problem;
  status = flags.Apply(problem);
  if (!status.ok()) return status;
  return problem;
}

TEST(ProblemFlags, SetsEachOption) {
  absl::StatusOr<Problem> p = Parsed({"--layout",         "packed_htd",
                                      "--scale",          "-0.5",
                                      "--softcap",        "30",
                                      "--causal",         "bottom_right",
                                      "--window",         "5,-1",
                                      "--dropout",        "0.1",
                                      "--dropout-seed",   "18446744073709551615",
                                      "--dropout-offset", "7",
                                      "--denominator",    "zero_rest",
                                      "--accumulate",     "f16"});
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->layout, Layout::kPackedHtd);
  EXPECT_EQ(p->scale, -0.5f);
  EXPECT_EQ(p->softcap, 30);
  EXPECT_TRUE(p->causal);
  EXPECT_EQ(p->alignment, Alignment::kBottomRight);
  EXPECT_EQ(p->window_left, 5);
  EXPECT_EQ(p->window_right, -1);
  EXPECT_EQ(p->dropout.threshold, 26u);
  EXPECT_EQ(p->dropout.seed, UINT64_MAX);
  EXPECT_EQ(p->dropout.offset, 7u);
  EXPECT_EQ(p->denominator, DenominatorKind::kZeroRest);
  EXPECT_EQ(p->accumulate, AccumulateType::kFloat16);
}

TEST(ProblemFlags, TakesCausalWithoutAValueAndAnOffsetAsAlignment) {
  absl::StatusOr<Problem> p = Parsed({"--causal"});
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_TRUE(p->causal);
  // Validate then wants one where lengths differ; it is never guessed.
  EXPECT_EQ(p->alignment, Alignment::kUnspecified);
  p = Parsed({"--align", "-3"});
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->offsets, std::vector<int32_t>{-3});
  EXPECT_FALSE(p->causal);
}

TEST(ProblemFlags, PlacesTheDiagonalOnce) {
  absl::StatusOr<Problem> p = Parsed({"--align", "bottom_right", "--causal"});
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_TRUE(p->causal);
  EXPECT_EQ(p->alignment, Alignment::kBottomRight);
  p = Parsed({"--causal", "--align", "7"});
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->alignment, Alignment::kOffsets);
  EXPECT_EQ(p->offsets, std::vector<int32_t>{7});
  EXPECT_TRUE(Parsed({"--causal", "bottom_right", "--align", "bottom_right"}).ok());
  for (const char* align : {"bottom_right", "7"}) {
    EXPECT_EQ(Parsed({"--causal", "top_left", "--align", align}).status().message(),
              "causal: expected the alignment that is given already, by align or the tensor "
              "offsets, got top_left");
  }
}

TEST(ProblemFlags, PrefersTheCommandLineToTheFile) {
  absl::StatusOr<Problem> p =
      Parsed({"--softcap", "1"}, {{"softcap", "2"}, {"causal", "top_left"}});
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->softcap, 1);
  EXPECT_TRUE(p->causal);
}

TEST(ProblemFlags, NamesTheFlagThatIsWrong) {
  auto message = [](std::vector<std::string> arguments) {
    return std::string(Parsed(std::move(arguments)).status().message());
  };
  EXPECT_EQ(message({"--window", "5"}), "--window: expected LEFT,RIGHT, got 5");
  EXPECT_EQ(message({"--window", "5,x"}), "--window: expected an integer, got x");
  EXPECT_EQ(message({"--dropout", "1"}), "--dropout: expected 0 to below 511/512, got 1");
  EXPECT_EQ(message({"--dropout", "nan"}), "--dropout: expected 0 to below 511/512, got nan");
  EXPECT_EQ(message({"--causal", "3"}),
            "--causal: expected top_left, bottom_right or (align) an offset, got 3");
  EXPECT_EQ(message({"--layout", "bhdl"}),
            "--layout: expected bhld, blhd, packed_thd or packed_htd, got bhdl");
  EXPECT_EQ(message({"--causal="}), "");
  EXPECT_EQ(Parsed({}, {{"dropout", "1"}}).status().message(),
            "dropout: expected 0 to below 511/512, got 1");
  EXPECT_EQ(Parsed({}, {{"causl", "x"}}).status().message(),
            "causl: expected the name of a problem flag in the file's metadata, got causl");
  EXPECT_TRUE(Parsed({}, {{"format", "pt"}}).ok()) << "what PyTorch's writers put there";
}

}  // namespace
}  // namespace attnd
