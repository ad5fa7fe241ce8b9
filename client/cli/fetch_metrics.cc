#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "client/cli/metrics_text.h"

namespace attnd {
namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;

struct Url {
  std::string host, port, path;
};

Url ParseUrl(const std::string& text) {
  absl::string_view rest = text;
  absl::ConsumePrefix(&rest, "http://");
  size_t slash = rest.find('/');
  absl::string_view authority = rest.substr(0, slash);
  size_t colon = authority.rfind(':');
  Url url;
  url.path = slash == absl::string_view::npos ? "/metrics" : std::string(rest.substr(slash));
  url.host = std::string(authority.substr(0, colon));
  url.port = colon == absl::string_view::npos ? "80" : std::string(authority.substr(colon + 1));
  return url;
}

// Socket: a connected TCP socket, closed when it goes.
class Socket {
 public:
  static absl::StatusOr<Socket> Connect(const Url& url, absl::Duration timeout) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(url.host.c_str(), url.port.c_str(), &hints, &found) != 0) {
      return absl::UnavailableError(absl::StrCat("--metrics: cannot find ", url.host));
    }
    Socket socket;
    for (addrinfo* at = found; at != nullptr && socket.fd_ < 0; at = at->ai_next) {
      socket.Try(*at, timeout);
    }
    freeaddrinfo(found);
    if (socket.fd_ >= 0) return socket;
    return absl::UnavailableError(
        absl::StrCat("--metrics: no answer from ", url.host, ":", url.port));
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }

  bool Send(const std::string& text) {
    return send(fd_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  // Up to the other side's end; false after an error, a timeout or too much.
  bool ReadAll(std::string& out) {
    char buffer[16384];
    while (true) {
      ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
      if (got <= 0) return got == 0;
      out.append(buffer, static_cast<size_t>(got));
      if (out.size() > kMaxBytes) return false;
    }
  }

 private:
  Socket() = default;
  void Try(const addrinfo& at, absl::Duration timeout) {
    fd_ = socket(at.ai_family, at.ai_socktype, at.ai_protocol);
    if (fd_ < 0) return;
    timeval limit = absl::ToTimeval(timeout);
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (connect(fd_, at.ai_addr, at.ai_addrlen) == 0) return;
    close(fd_);
    fd_ = -1;
  }
  int fd_ = -1;
};

}  // namespace

std::string CheckMetricsUrl(const std::string& url) {
  if (absl::StartsWith(url, "http://") || !absl::StrContains(url, "://")) return "";
  return absl::StrCat("expected http://HOST:PORT/PATH, got ", url);
}

absl::StatusOr<std::string> FetchMetrics(const std::string& text, absl::Duration timeout) {
  const Url url = ParseUrl(text);
  ASSIGN_OR_RETURN(Socket socket, Socket::Connect(url, timeout));
  // HTTP/1.0: no chunks, and the end of the answer is the end of the connection.
  std::string answer;
  if (!socket.Send(absl::StrCat("GET ", url.path, " HTTP/1.0\r\nHost: ", url.host,
                                "\r\nAccept: text/plain\r\nConnection: close\r\n\r\n")) ||
      !socket.ReadAll(answer)) {
    return absl::UnavailableError(absl::StrCat("--metrics: no whole answer from ", text));
  }
  size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos || !absl::StrContains(answer.substr(0, 16), " 200")) {
    return absl::UnavailableError(
        absl::StrCat("--metrics: ", text, " answered ",
                     absl::CHexEscape(answer.substr(0, std::min<size_t>(answer.find('\r'), 64)))));
  }
  return answer.substr(body + 4);
}

}  // namespace attnd
