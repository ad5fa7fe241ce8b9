#include "server/security/certificate_files.h"

#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdio>
#include <ctime>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

using File = std::unique_ptr<std::FILE, decltype(&std::fclose)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

absl::StatusOr<Certificate> ReadCertificate(absl::string_view flag, const std::string& path) {
  File file(std::fopen(path.c_str(), "r"), &std::fclose);
  Certificate certificate(nullptr, &X509_free);
  if (file != nullptr) certificate.reset(PEM_read_X509(file.get(), nullptr, nullptr, nullptr));
  if (certificate == nullptr) return WrongFile(flag, "a PEM file with a certificate", path);
  return certificate;
}

// No passphrase: a daemon has nobody to ask.
absl::StatusOr<Key> ReadKey(const std::string& path) {
  auto no_passphrase = [](char*, int, int, void*) { return 0; };
  File file(std::fopen(path.c_str(), "r"), &std::fclose);
  Key key(nullptr, &EVP_PKEY_free);
  if (file != nullptr) {
    key.reset(PEM_read_PrivateKey(file.get(), nullptr, no_passphrase, nullptr));
  }
  if (key == nullptr) return WrongFile("tls_key", "a PEM file with an unencrypted key", path);
  return key;
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
  tm end = {};
  if (!certificate.ok() || ASN1_TIME_to_tm(X509_get0_notAfter(certificate->get()), &end) != 1) {
    return absl::InfinitePast();
  }
  return absl::FromTM(end, absl::UTCTimeZone());
}

}  // namespace attnd
