#include "server/security/auth.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

TEST(Authenticator, ReadsNamesAndTokens) {
  auto auth = Authenticator::FromTokenText(
      "# who\n\n alice\t0123456789abcdef # her laptop\nbob fedcba98765432100\r\n");
  ASSERT_TRUE(auth.ok()) << auth.status();
  EXPECT_EQ(*auth->CheckToken("Bearer 0123456789abcdef"), "alice");
  EXPECT_EQ(*auth->CheckToken("bearer  fedcba98765432100 "), "bob");
  EXPECT_EQ(ReasonOf(auth->CheckToken("Bearer 0123456789abcdee").status()), reason::kTokenInvalid);
  EXPECT_EQ(ReasonOf(auth->CheckToken("0123456789abcdef").status()), reason::kTokenMissing);
}

TEST(Authenticator, NeverRepeatsATokenInAnError) {
  auto auth = *Authenticator::FromTokenText("a 0123456789abcdef");
  EXPECT_EQ(
      std::string(auth.CheckToken("Bearer secret-secret-1").status().message()).find("secret"),
      std::string::npos);
}

TEST(Authenticator, RefusesFilesThatProtectNothing) {
  for (const char* text : {"", "# nobody\n", "alice\n", "alice short\n",
                           "alice 0123456789abcdef x\n", "alice 0123456789abcd\xc3\xa9\n"}) {
    EXPECT_FALSE(Authenticator::FromTokenText(text).ok()) << text;
  }
  EXPECT_EQ(
      Authenticator::FromTokenText("ok 0123456789abcdef\nbad\n").status().message(),
      "--token_file: expected \"name token\" with a token of at least 16 printable ASCII bytes, "
      "got something else in line 2");
  EXPECT_EQ(
      Authenticator::FromTokenText("a 0123456789abcdef\nb 0123456789abcdef\n").status().message(),
      "--token_file: expected each token under one name, got one again in line 2");
  EXPECT_TRUE(Authenticator::FromTokenText("a 0123456789abcdef\na fedcba9876543210\n").ok());
  EXPECT_EQ(Authenticator::FromTokenFile("/nonexistent").status().code(),
            absl::StatusCode::kNotFound);
}

TEST(Authenticator, TakesTokensFromFilesAlone) {
  const std::string path = absl::StrCat(testing::TempDir(), "/token_pipe_", getpid());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  for (const std::string& other : {path, testing::TempDir(), std::string("/dev/zero")}) {
    EXPECT_EQ(Authenticator::FromTokenFile(other).status().message(),
              absl::StrCat("--token_file: expected a regular file, got a folder, pipe or device, ",
                           other));
  }
  unlink(path.c_str());
}

TEST(Authenticator, SaysWhoElseCanReadItsFile) {
  const std::string path = absl::StrCat(testing::TempDir(), "/exposed_tokens_", getpid());
  std::ofstream(path) << "alice 0123456789abcdef\n";
  for (mode_t mode : {0400, 0600, 0640}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    EXPECT_EQ(TokenFileExposure(path), "");
  }
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_EQ(TokenFileExposure(path), absl::StrCat("--token_file: every user of this host can read ",
                                                  path, "; take that right away (chmod o-r)"));
}

TEST(CallerOfPeer, IsTheAddressWithoutThePort) {
  EXPECT_EQ(CallerOfPeer("ipv4:10.0.0.1:4711"), "10.0.0.1");
  EXPECT_EQ(CallerOfPeer("ipv6:[::1]:4711"), "[::1]");
  EXPECT_EQ(CallerOfPeer("ipv6:%5B::1%5D:4711"), "%5B::1%5D");
  EXPECT_EQ(CallerOfPeer("unix:"), "unix");
}

}  // namespace
}  // namespace attnd
