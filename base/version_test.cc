#include "base/version.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

bool IsHexDigit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

TEST(Version, HasThreeNumbers) {
  std::vector<std::string> parts = absl::StrSplit(kVersion, '.');
  ASSERT_EQ(parts.size(), 3u);
  for (const std::string& part : parts) {
    EXPECT_FALSE(part.empty());
    EXPECT_TRUE(std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; }));
  }
}

TEST(Version, CommitIsTwelveHexDigitsOrUnknown) {
  absl::string_view commit = absl::StripSuffix(Commit(), "-dirty");
  if (commit == "unknown") return;
  EXPECT_EQ(commit.size(), 12u) << commit;
  EXPECT_TRUE(std::all_of(commit.begin(), commit.end(), IsHexDigit)) << commit;
}

TEST(Version, StringHoldsBoth) {
  EXPECT_EQ(VersionString(), absl::StrCat(kVersion, " (", Commit(), ")"));
}

}  // namespace
}  // namespace attnd
