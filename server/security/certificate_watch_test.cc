#include "server/security/certificate_watch.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/read_file.h"
#include "server/security/certificate_files.h"

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

TEST_F(CertificateWatchTest, KnowsWhenItsFilesAreValid) {
  const absl::Time now = absl::Now();
  EXPECT_TRUE(CheckCertificateTimes(files_, now).ok()) << CheckCertificateTimes(files_, now);
  EXPECT_TRUE(absl::StartsWith(CheckCertificateTimes(files_, now + absl::Hours(49)).message(),
                               "--tls_cert: expected a certificate that is valid now, got one that "
                               "ended at "));
  EXPECT_TRUE(absl::StartsWith(CheckCertificateTimes(files_, now - absl::Hours(1)).message(),
                               "--tls_cert: expected a certificate that is valid now, got one that "
                               "begins at "));
}

TEST_F(CertificateWatchTest, WarnsOnceOfACertificateThatHasEnded) {
  FILE* file = std::tmpfile();
  Logger log(file, LogFormat::kText, Severity::kWarning);
  auto warnings = [&] {
    std::rewind(file);
    std::string text(4096, ' ');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    const std::vector<std::string> parts = absl::StrSplit(text, "event=certificate_not_valid");
    return static_cast<int>(parts.size()) - 1;
  };
  auto watch = CertificateWatch::Start(files_, log);
  ASSERT_TRUE(watch.ok()) << watch.status();
  EXPECT_EQ(warnings(), 0);
  const std::string renew =
      absl::StrCat("openssl x509 -in ", files_.certificate, " -signkey ", files_.key,
                   " -days -1 -out ", files_.certificate, ".new 2> /dev/null && mv ",
                   files_.certificate, ".new ", files_.certificate);
  ASSERT_EQ(std::system(renew.c_str()), 0);
  for (int n = 0; n < 2; ++n) {
    (*watch)->Look();
    EXPECT_EQ(warnings(), 1);
  }
  EXPECT_TRUE(CertificateWatch::Start(files_, log).ok());  // it starts, and warns
  EXPECT_EQ(warnings(), 2);
  std::fclose(file);
}

TEST_F(CertificateWatchTest, RefusesAPipe) {
  std::remove(files_.key.c_str());
  ASSERT_EQ(mkfifo(files_.key.c_str(), 0600), 0);
  EXPECT_EQ(
      CertificateWatch::Start(files_, log_).status().message(),
      absl::StrCat("--tls_key: expected a PEM file with an unencrypted key, got ", files_.key));
  std::remove(files_.key.c_str());
}

TEST_F(CertificateWatchTest, RefusesFilesThatAreWrongAtTheStart) {
  Write(files_.key, "");
  EXPECT_EQ(CertificateWatch::Start(files_, log_).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace attnd
