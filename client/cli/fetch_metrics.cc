// FetchMetrics over OpenSSL's BIOs, which gRPC brings anyway (docs/ARCHITECTURE.md says why).
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

#include <algorithm>
#include <ctime>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "client/cli/metrics_text.h"

namespace attnd {
namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;
constexpr unsigned kPollMilliseconds = 20;

struct Url {
  bool tls = false;
  std::string host, port, path;
};

Url ParseUrl(const std::string& text) {
  absl::string_view rest = text;
  Url url;
  url.tls = absl::ConsumePrefix(&rest, "https://");
  absl::ConsumePrefix(&rest, "http://");
  size_t slash = rest.find('/');
  absl::string_view authority = rest.substr(0, slash);
  size_t colon = authority.rfind(':');
  if (absl::EndsWith(authority, "]")) colon = absl::string_view::npos;  // of an IPv6 address
  url.path = slash == absl::string_view::npos ? "/metrics" : std::string(rest.substr(slash));
  url.host = std::string(authority.substr(0, colon));
  const char* usual = url.tls ? "443" : "80";
  url.port = colon == absl::string_view::npos ? usual : std::string(authority.substr(colon + 1));
  return url;
}

struct Free {
  void operator()(BIO* bio) const { BIO_free_all(bio); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

absl::Status TlsError(absl::string_view what, const std::string& about) {
  const char* reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return absl::UnavailableError(absl::StrCat("--metrics: ", what, " ", about, ": ",
                                             reason == nullptr ? "no reason given" : reason));
}

// Connection: a TCP or TLS connection, with a time by which all must be done.
class Connection {
 public:
  static absl::StatusOr<Connection> Connect(const Url& url, const MetricsAccess& access,
                                            absl::Duration timeout) {
    Connection made(timeout);
    RETURN_IF_ERROR(made.Open(url, access));
    const std::string place = absl::StrCat(url.host, ":", url.port);
    BIO_set_conn_hostname(made.bio_.get(), place.c_str());
    while (BIO_do_connect(made.bio_.get()) <= 0) {
      if (made.Wait()) continue;
      if (!url.tls) {
        ERR_clear_error();
        return absl::UnavailableError(absl::StrCat("--metrics: no answer from ", place));
      }
      return made.HandshakeError(place);
    }
    return made;
  }

  bool Send(absl::string_view text) {
    while (!text.empty()) {
      const int sent = BIO_write(bio_.get(), text.data(), static_cast<int>(text.size()));
      if (sent > 0) {
        text.remove_prefix(static_cast<size_t>(sent));
      } else if (!Wait()) {
        return false;
      }
    }
    return true;
  }
  // Up to the other side's end; false after an error, too much time or too many bytes.
  bool ReadAll(std::string& out) {
    char buffer[16384];
    while (true) {
      const int got = BIO_read(bio_.get(), buffer, sizeof(buffer));
      if (got > 0) {
        out.append(buffer, static_cast<size_t>(got));
        if (out.size() > kMaxBytes) return false;
      } else if (!BIO_should_retry(bio_.get())) {
        return got == 0;
      } else if (!Wait()) {
        return false;
      }
    }
  }

 private:
  explicit Connection(absl::Duration timeout)
      : deadline_(std::time(nullptr) + std::max<int64_t>(1, absl::ToInt64Seconds(timeout))) {}

  absl::Status Open(const Url& url, const MetricsAccess& access) {
    if (!url.tls) {
      bio_.reset(BIO_new(BIO_s_connect()));
    } else {
      context_.reset(SSL_CTX_new(TLS_client_method()));
      SSL_CTX_set_options(context_.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
      SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER, nullptr);
      const bool loaded =
          access.ca_file.empty()
              ? SSL_CTX_set_default_verify_paths(context_.get()) == 1
              : SSL_CTX_load_verify_locations(context_.get(), access.ca_file.c_str(), nullptr) == 1;
      if (!loaded) return TlsError("no certificate authorities in", access.ca_file);
      bio_.reset(BIO_new_ssl_connect(context_.get()));
      SSL* ssl = nullptr;
      BIO_get_ssl(bio_.get(), &ssl);
      SSL_set_mode(ssl, SSL_MODE_AUTO_RETRY);
      SSL_set_tlsext_host_name(ssl, url.host.c_str());
      X509_VERIFY_PARAM* wanted = SSL_get0_param(ssl);
      if (X509_VERIFY_PARAM_set1_ip_asc(wanted, url.host.c_str()) != 1) {
        X509_VERIFY_PARAM_set1_host(wanted, url.host.c_str(), 0);
      }
      ERR_clear_error();
    }
    BIO_set_nbio(bio_.get(), 1);
    return absl::OkStatus();
  }

  absl::Status HandshakeError(const std::string& place) {
    SSL* ssl = nullptr;
    BIO_get_ssl(bio_.get(), &ssl);
    const long verified = SSL_get_verify_result(ssl);  // NOLINT(runtime/int): OpenSSL's type
    if (verified == X509_V_OK) return TlsError("no TLS with", place);
    ERR_clear_error();
    return absl::UnavailableError(
        absl::StrCat("--metrics: the certificate of ", place,
                     " is not trusted: ", X509_verify_cert_error_string(verified)));
  }
  // Until the next byte may move; false when the last operation failed or the time is over.
  bool Wait() {
    return BIO_should_retry(bio_.get()) && BIO_wait(bio_.get(), deadline_, kPollMilliseconds) > 0 &&
           std::time(nullptr) <= deadline_;
  }

  std::unique_ptr<SSL_CTX, Free> context_;  // null without TLS
  std::unique_ptr<BIO, Free> bio_;
  std::time_t deadline_;
};

}  // namespace

std::string CheckMetricsUrl(const std::string& url) {
  const bool known = absl::StartsWith(url, "http://") || absl::StartsWith(url, "https://");
  if (known || !absl::StrContains(url, "://")) return "";
  return absl::StrCat("expected http://HOST:PORT/PATH or https://..., got ", url);
}

absl::StatusOr<std::string> FetchMetrics(const std::string& text, absl::Duration timeout,
                                         const MetricsAccess& access) {
  const Url url = ParseUrl(text);
  ASSIGN_OR_RETURN(Connection connection, Connection::Connect(url, access, timeout));
  // HTTP/1.0: no chunks, and the end of the answer is the end of the connection.
  std::string request = absl::StrCat("GET ", url.path, " HTTP/1.0\r\nHost: ", url.host,
                                     "\r\nAccept: text/plain\r\nConnection: close\r\n");
  if (url.tls && !access.token.empty()) {
    absl::StrAppend(&request, "Authorization: Bearer ", access.token, "\r\n");
  }
  std::string answer;
  const bool whole = connection.Send(request + "\r\n") && connection.ReadAll(answer);
  ERR_clear_error();
  if (!whole) return absl::UnavailableError(absl::StrCat("--metrics: no whole answer from ", text));
  size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos || !absl::StrContains(answer.substr(0, 16), " 200")) {
    return absl::UnavailableError(
        absl::StrCat("--metrics: ", text, " answered ",
                     absl::CHexEscape(answer.substr(0, std::min<size_t>(answer.find('\r'), 64)))));
  }
  return answer.substr(body + 4);
}

}  // namespace attnd
