#include "server/server_files.h"

#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/auth.h"

namespace attnd {
namespace {

using File = std::unique_ptr<std::FILE, decltype(&std::fclose)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

absl::Status WrongFile(absl::string_view flag, absl::string_view expected,
                       const std::string& path) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", expected, ", got ", path));
}

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

// Whether this process can make files in the folder of `path`.
absl::Status CheckFolder(absl::string_view flag, const std::string& path) {
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code none;
  if (std::filesystem::is_directory(folder, none) && access(folder.c_str(), W_OK | X_OK) == 0) {
    return absl::OkStatus();
  }
  return WrongFile(flag, "a path in a folder that this user can write to", path);
}

absl::Status CheckUnixSocket(const std::string& path) {
  RETURN_IF_ERROR(CheckFolder("listen", path));
  struct stat what;  // a dead daemon's socket is taken over
  if (lstat(path.c_str(), &what) != 0 || S_ISSOCK(what.st_mode)) return absl::OkStatus();
  return WrongFile("listen", "a path for a socket", absl::StrCat("a file, ", path));
}

// A plain file is put in an older one's place; another one is written to where it is.
absl::Status CheckPortFile(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  struct stat what;
  if (lstat(path.c_str(), &what) != 0 || S_ISREG(what.st_mode)) return CheckFolder(flag, path);
  bool fits = !S_ISDIR(what.st_mode) && access(path.c_str(), W_OK) == 0;
  return fits ? absl::OkStatus() : WrongFile(flag, "a file that this user can write to", path);
}

}  // namespace

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

absl::Status CheckFiles(const ServerOptions& options) {
  for (const std::string& address : options.listen) {
    const std::string path = UnixPath(address);
    if (!path.empty()) RETURN_IF_ERROR(CheckUnixSocket(path));
  }
  RETURN_IF_ERROR(CheckPortFile("port_file", options.port_file));
  RETURN_IF_ERROR(CheckPortFile("metrics_port_file", options.metrics_port_file));
  RETURN_IF_ERROR(CheckTlsFiles(options.tls));
  if (options.token_file.empty()) return absl::OkStatus();
  return Authenticator::FromTokenFile(options.token_file).status();
}

}  // namespace attnd
