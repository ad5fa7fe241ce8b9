#include "server/security/certificate_files.h"

#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdio>
#include <ctime>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/read_file.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

using File = std::unique_ptr<std::FILE, decltype(&std::fclose)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

// Null for what cannot be read, or is no file: opening a pipe would wait for a writer for ever.
File OpenFile(const std::string& path) {
  return {IsRegularFile(path) ? std::fopen(path.c_str(), "r") : nullptr, &std::fclose};
}

absl::StatusOr<Certificate> ReadCertificate(absl::string_view flag, const std::string& path) {
  File file = OpenFile(path);
  Certificate certificate(nullptr, &X509_free);
  if (file != nullptr) certificate.reset(PEM_read_X509(file.get(), nullptr, nullptr, nullptr));
  if (certificate == nullptr) return WrongFile(flag, "a PEM file with a certificate", path);
  return certificate;
}

// No passphrase: a daemon has nobody to ask.
absl::StatusOr<Key> ReadKey(const std::string& path) {
  auto no_passphrase = [](char*, int, int, void*) { return 0; };
  File file = OpenFile(path);
  Key key(nullptr, &EVP_PKEY_free);
  if (file != nullptr) {
    key.reset(PEM_read_PrivateKey(file.get(), nullptr, no_passphrase, nullptr));
  }
  if (key == nullptr) return WrongFile("tls_key", "a PEM file with an unencrypted key", path);
  return key;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

absl::Status CheckTimes(absl::string_view flag, const std::string& path, absl::Time now) {
  ASSIGN_OR_RETURN(Certificate certificate, ReadCertificate(flag, path));
  const absl::Time begin = TimeOf(X509_get0_notBefore(certificate.get())),
                   end = TimeOf(X509_get0_notAfter(certificate.get()));
  if (begin <= now && now <= end) return absl::OkStatus();
  return WrongFile(flag, "a certificate that is valid now",
                   absl::StrCat(now < begin ? "one that begins at " : "one that ended at ",
                                absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", now < begin ? begin : end,
                                                 absl::UTCTimeZone()),
                                ", ", path));
}

}  // namespace

absl::Status WrongFile(absl::string_view flag, absl::string_view expected,
                       const std::string& path) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", expected, ", got ", path));
}

absl::Status CheckTlsFiles(const TlsOptions& tls) {
  if (tls.certificate.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(Certificate certificate, ReadCertificate("tls_cert", tls.certificate));
  ASSIGN_OR_RETURN(Key key, ReadKey(tls.key));
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return WrongFile("tls_key", "the key of --tls_cert", absl::StrCat("another, ", tls.key));
  }
  if (tls.client_ca.empty()) return absl::OkStatus();
  return ReadCertificate("tls_client_ca", tls.client_ca).status();
}

absl::Time CertificateExpiry(const std::string& path) {
  auto certificate = ReadCertificate("tls_cert", path);
  return certificate.ok() ? TimeOf(X509_get0_notAfter(certificate->get())) : absl::InfinitePast();
}

absl::Status CheckCertificateTimes(const TlsOptions& tls, absl::Time now) {
  if (tls.certificate.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckTimes("tls_cert", tls.certificate, now));
  if (tls.client_ca.empty()) return absl::OkStatus();
  return CheckTimes("tls_client_ca", tls.client_ca, now);
}

}  // namespace attnd
