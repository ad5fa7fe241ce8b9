#include "client/channels/credentials.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/whole_file.h"

namespace attnd {
namespace {

absl::StatusOr<std::string> ReadPem(absl::string_view option, const std::string& path) {
  if (path.empty()) return std::string();
  ASSIGN_OR_RETURN(std::string contents, ReadWholeFile(path, option));
  if (!contents.empty()) return contents;
  return absl::InvalidArgumentError(
      absl::StrCat(option, ": expected a PEM file, got an empty one, ", path));
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeTls(const ClientTlsOptions& tls) {
  if (tls.certificate_file.empty() != tls.key_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tls: expected certificate_file and key_file together, got ",
                     tls.key_file.empty() ? "certificate_file" : "key_file", " alone"));
  }
  grpc::SslCredentialsOptions pem;
  ASSIGN_OR_RETURN(pem.pem_root_certs, ReadPem("tls.ca_file", tls.ca_file));
  ASSIGN_OR_RETURN(pem.pem_cert_chain, ReadPem("tls.certificate_file", tls.certificate_file));
  ASSIGN_OR_RETURN(pem.pem_private_key, ReadPem("tls.key_file", tls.key_file));
  return grpc::SslCredentials(pem);
}

// Checks that a header may hold the text. gRPC takes other bytes for a mistake of the program and
// ends it.
bool IsHeaderText(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

bool IsLoopback(absl::string_view ipv4) {
  in_addr address;
  return inet_pton(AF_INET, std::string(ipv4).c_str(), &address) == 1 &&
         ntohl(address.s_addr) >> 24 == IN_LOOPBACKNET;
}

}  // namespace

bool IsLocalAddress(absl::string_view address) {
  for (absl::string_view scheme : {"unix:", "unix-abstract:"}) {
    if (absl::StartsWith(address, scheme)) return true;
  }
  for (absl::string_view scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::ConsumePrefix(&address, scheme)) break;
  }
  return IsLoopback(address.substr(0, address.rfind(':'))) ||
         absl::StartsWith(address, "localhost:") || absl::StartsWith(address, "[::1]:");
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options) {
  if (!IsHeaderText(options.bearer_token)) {
    return absl::InvalidArgumentError(
        "bearer_token: expected printable ASCII in one line, got other bytes");
  }
  if (options.tls.has_value()) return MakeTls(*options.tls);
  if (!options.bearer_token.empty()) {
    for (const std::string& address : options.addresses) {
      if (IsLocalAddress(address)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("bearer_token: expected TLS or a local address, since anyone between could "
                       "read the token, got ",
                       address, " without TLS"));
    }
  }
  return grpc::InsecureChannelCredentials();
}

}  // namespace attnd
