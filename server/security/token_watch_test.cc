#include "server/security/token_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace attnd {
namespace {

class TokenWatchTest : public testing::Test {
 protected:
  TokenWatchTest() {
    Write("alice 0123456789abcdef\n");
    auto auth = Authenticator::FromTokenFile(path_);
    CHECK(auth.ok()) << auth.status().message();
    auth_ = *std::move(auth);
  }
  void Write(const std::string& text) { std::ofstream(path_) << text; }
  std::string NameOf(const std::string& token) {
    return auth_.CheckToken(absl::StrCat("Bearer ", token)).value_or("nobody");
  }

  const std::string path_ = absl::StrCat(testing::TempDir(), "/watched_tokens_", getpid());
  Authenticator auth_;
  Logger log_{stderr, LogFormat::kText, Severity::kError};
};

TEST_F(TokenWatchTest, TakesNewTokensAndForgetsOldOnes) {
  TokenWatch watch(path_, absl::Hours(1), auth_, log_);
  Write("alice 1111111111111111\nbob fedcba9876543210\n");
  EXPECT_EQ(NameOf("0123456789abcdef"), "alice");
  watch.Look();
  EXPECT_EQ(NameOf("0123456789abcdef"), "nobody");
  EXPECT_EQ(NameOf("1111111111111111"), "alice");
  EXPECT_EQ(NameOf("fedcba9876543210"), "bob");
}

TEST_F(TokenWatchTest, KeepsTheOldTokensWhenTheFileIsBadEmptyOrAway) {
  TokenWatch watch(path_, absl::Hours(1), auth_, log_);
  for (const char* text : {"alice short\n", "", "# nobody\n"}) {
    Write(text);
    watch.Look();
    EXPECT_EQ(NameOf("0123456789abcdef"), "alice") << text;
    EXPECT_EQ(NameOf("short"), "nobody");
  }
  std::remove(path_.c_str());
  watch.Look();
  EXPECT_EQ(NameOf("0123456789abcdef"), "alice");
}

TEST_F(TokenWatchTest, LooksByItself) {
  TokenWatch watch(path_, absl::Milliseconds(1), auth_, log_);
  Write("carol 2222222222222222\n");
  while (NameOf("2222222222222222") != "carol") std::this_thread::yield();
  EXPECT_EQ(NameOf("0123456789abcdef"), "nobody");
}

}  // namespace
}  // namespace attnd
