#include "client/cli/session.h"

#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "client/channels/address.h"
#include "client/cli/json_text.h"
#include "client/cli/printable.h"
#include "proto/attnd/v1/error_reasons.h"

namespace attnd {
namespace {

// no-color.org: set and not empty means none. A dumb terminal knows no escapes.
bool WantsColor() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  return (no_color == nullptr || *no_color == '\0') &&
         (terminal == nullptr || absl::string_view(terminal) != "dumb");
}

std::string CheckAddresses(const std::string& addresses) {
  const std::vector<std::string> each = absl::StrSplit(addresses, ',', absl::SkipEmpty());
  if (each.empty()) return "expected host:port or unix:path, got nothing";
  for (const std::string& address : each) {
    absl::Status status = CheckAddress(address);
    if (!status.ok()) return std::string(status.message());
  }
  return "";
}

}  // namespace

Session::Session(CLI::App& app)
    : color_(isatty(STDOUT_FILENO) != 0 && WantsColor()),
      shows_progress_(isatty(STDERR_FILENO) != 0) {
  app.add_option("-a,--address", addresses_,
                 "host:port or unix:path of the daemon; several, separated by commas, are replicas")
      ->envname("ATTND_ADDRESS")
      ->check(&CheckAddresses)
      ->capture_default_str();
  app.add_option("-o,--output", output_, "table or json")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  app.add_option("--timeout", timeout_seconds_, "seconds that one call may take")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  app.add_flag("--tls", tls_, "TLS with the system's certificate authorities");
  app.add_option("--tls-ca", ca_file_, "TLS with this authority (PEM file)");
  app.add_option("--tls-cert", certificate_file_, "client certificate for mutual TLS (PEM file)");
  app.add_option("--tls-key", key_file_, "its private key (PEM file)");
  app.add_option("--tls-server-name", server_name_, "name expected in the server's certificate");
  app.add_option("--token-file", token_file_, "file with a bearer token alone")
      ->envname("ATTND_TOKEN_FILE");
  app.add_option("--proxy", proxy_,
                 "http://host:port of a proxy to connect through, or environment: that of "
                 "https_proxy or http_proxy");
  app.add_option("--channels", channels_, "connections to each address")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--shard-bytes", shard_bytes_, "size that calls are cut to")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
}

absl::StatusOr<ClientOptions> Session::MakeClientOptions() const {
  ClientOptions options;
  options.addresses = absl::StrSplit(addresses_, ',', absl::SkipEmpty());
  options.timeout = absl::Seconds(timeout_seconds_);
  options.channels_per_address = channels_;
  options.shard_bytes = shard_bytes_;
  options.proxy = proxy_;
  if (tls_ || !ca_file_.empty() || !certificate_file_.empty() || !key_file_.empty()) {
    options.tls = ClientTlsOptions{.ca_file = ca_file_,
                                   .certificate_file = certificate_file_,
                                   .key_file = key_file_,
                                   .server_name = server_name_};
  }
  if (!token_file_.empty()) {
    ASSIGN_OR_RETURN(options.bearer_token, ReadWholeFile(token_file_, "--token-file"));
    absl::StripAsciiWhitespace(&options.bearer_token);
    if (options.bearer_token.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--token-file: expected a token, got none in ", token_file_));
    }
  }
  return options;
}

absl::StatusOr<std::unique_ptr<AttentionClient>> Session::Connect() {
  ASSIGN_OR_RETURN(ClientOptions options, MakeClientOptions());
  return AttentionClient::Connect(std::move(options));
}

void Session::FailUsage(const absl::Status& status) {
  Fail(status);
  Exit(kExitUsage);
}

void Session::Fail(const absl::Status& status, absl::string_view asked) {
  if (json()) {
    PrintJson(status, asked);
  } else {
    PrintText(status, asked);
  }
  bool unreachable = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  Exit(unreachable ? kExitUnreachable : kExitFailed);
}

void Session::PrintJson(const absl::Status& status, absl::string_view asked) const {
  nlohmann::ordered_json error = {{"code", absl::StatusCodeToString(status.code())},
                                  {"message", status.message()},
                                  {"address", asked.empty() ? addresses_ : asked}};
  if (std::optional<ErrorDetail> detail = DetailOf(status); detail.has_value()) {
    error["reason"] = detail->reason;
    error["metadata"] = detail->metadata;
  }
  std::cerr << JsonText({{"error", std::move(error)}}, -1) << "\n";
}

void Session::PrintText(const absl::Status& status, absl::string_view asked) const {
  std::cerr << "attnctl: " << absl::StatusCodeToString(status.code()) << ": "
            << Printable(status.message()) << "\n";
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (detail.has_value()) {
    std::cerr << "  reason: " << Printable(detail->reason) << "\n";
    for (const auto& [key, value] : detail->metadata) {
      std::cerr << "  " << Printable(key) << ": " << Printable(value) << "\n";
    }
    const absl::string_view cure = CureOf(absl::StatusCodeToString(status.code()), detail->reason);
    if (!cure.empty()) std::cerr << "  what to do: " << cure << "\n";
  }
  bool of_metrics = absl::StartsWith(status.message(), "--metrics");
  if (absl::IsUnavailable(status) && !detail.has_value() && !of_metrics) {
    std::cerr
        << "  is a daemon listening on " << (asked.empty() ? addresses_ : asked)
        << "? If it is, see that both sides use TLS or neither does (--tls-ca), and that it is\n"
           "  shown a certificate if it asks for one (--tls-cert, --tls-key)\n";
  }
}

}  // namespace attnd
