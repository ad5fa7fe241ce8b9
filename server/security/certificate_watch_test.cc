#include "server/security/certificate_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/read_file.h"

namespace attnd {
namespace {

class CertificateWatchTest : public testing::Test {
 protected:
  CertificateWatchTest() {
    Issue();
    auto watch = CertificateWatch::Start(files_, log_);
    CHECK(watch.ok()) << watch.status().message();
    watch_ = *std::move(watch);
  }

  // A new certificate with a new key.
  void Issue() {
    const std::string command = absl::StrCat(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout ",
        files_.key, " -out ", files_.certificate, " > /dev/null 2>&1");
    CHECK(std::system(command.c_str()) == 0) << command;
  }
  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
  }
  std::string ServedCertificate() const { return ReadFile(watch_->copies().certificate); }
  std::string ServedKey() const { return ReadFile(watch_->copies().key); }

  const std::string base_ = absl::StrCat(testing::TempDir(), "/watched_certificate_", getpid());
  const TlsOptions files_{.certificate = base_ + ".pem",
                          .key = base_ + ".key",
                          .client_ca = base_ + ".pem",
                          .refresh = absl::Hours(1)};
  Logger log_{stderr, LogFormat::kText, Severity::kError};
  std::unique_ptr<CertificateWatch> watch_;
};

TEST_F(CertificateWatchTest, ServesWhatTheFilesHold) {
  EXPECT_EQ(ServedCertificate(), ReadFile(files_.certificate));
  EXPECT_EQ(ServedKey(), ReadFile(files_.key));
  EXPECT_EQ(ReadFile(watch_->copies().client_ca), ReadFile(files_.client_ca));
}

TEST_F(CertificateWatchTest, TakesANewPair) {
  Issue();
  EXPECT_NE(ServedCertificate(), ReadFile(files_.certificate));
  watch_->Look();
  EXPECT_EQ(ServedCertificate(), ReadFile(files_.certificate));
  EXPECT_EQ(ServedKey(), ReadFile(files_.key));
}

TEST_F(CertificateWatchTest, KeepsTheOldPairUntilTheFilesAreRightTogether) {
  const std::string certificate = ServedCertificate(), key = ServedKey();
  Issue();
  const std::string new_certificate = ReadFile(files_.certificate), new_key = ReadFile(files_.key);
  auto look = [&] {
    watch_->Look();
    return ServedCertificate() == certificate && ServedKey() == key;
  };
  Write(files_.key, key);  // the certificate is renewed, its key is not yet
  EXPECT_TRUE(look());
  Write(files_.key, new_key);
  Write(files_.certificate, new_certificate.substr(0, new_certificate.size() / 2));
  EXPECT_TRUE(look());
  Write(files_.certificate, "");
  EXPECT_TRUE(look());
  std::remove(files_.certificate.c_str());
  EXPECT_TRUE(look());
  Write(files_.certificate, new_certificate);
  EXPECT_FALSE(look());
  EXPECT_EQ(ServedCertificate(), new_certificate);
  EXPECT_EQ(ServedKey(), new_key);
}

TEST_F(CertificateWatchTest, RefusesFilesThatAreWrongAtTheStart) {
  Write(files_.key, "");
  EXPECT_EQ(CertificateWatch::Start(files_, log_).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace attnd
