#include "server/metrics/span_export.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "net/file_descriptor.h"

namespace attnd {
namespace {

using Json = nlohmann::json;

constexpr char kPath[] = "/v1/traces";
constexpr int kServer = 2, kInternal = 1;  // Span.SpanKind
constexpr int kError = 2;                  // Status.StatusCode

std::string Nanoseconds(absl::Time time) { return absl::StrCat(absl::ToUnixNanos(time)); }

std::string NewSpanId(absl::BitGen& random) {
  return absl::StrFormat("%016x", absl::Uniform<uint64_t>(random, 1, UINT64_MAX));
}

Json Attribute(const std::string& key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}

Json SpanOf(const TraceContext& trace, const std::string& id, const std::string& parent,
            const std::string& name, int kind, absl::Time begin, absl::Time end) {
  return {{"traceId", trace.trace_id},
          {"spanId", id},
          {"parentSpanId", parent},
          {"name", name},
          {"kind", kind},
          {"startTimeUnixNano", Nanoseconds(begin)},
          {"endTimeUnixNano", Nanoseconds(end)}};
}

// Whether the socket may be read or written before then.
bool IsReady(int socket, short events, absl::Time until) {
  pollfd one{.fd = socket, .events = events, .revents = 0};
  const int64_t left = absl::ToInt64Milliseconds(until - SteadyNow());
  return left > 0 && poll(&one, 1, static_cast<int>(left)) > 0;
}

FileDescriptor Connect(const std::string& host, const std::string& port, absl::Time until) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  FileDescriptor connected;
  for (addrinfo* at = found; at != nullptr && !connected.valid(); at = at->ai_next) {
    FileDescriptor one(socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!one.valid()) continue;
    const bool begun = connect(one.get(), at->ai_addr, at->ai_addrlen) == 0 || errno == EINPROGRESS;
    int error = 0;
    socklen_t size = sizeof(error);
    if (begun && IsReady(one.get(), POLLOUT, until) &&
        getsockopt(one.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) {
      connected = std::move(one);
    }
  }
  freeaddrinfo(found);
  return connected;
}

bool Send(int socket, absl::string_view bytes, absl::Time until) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno != EAGAIN || !IsReady(socket, POLLOUT, until)) {
      return false;
    }
  }
  return true;
}

// The first line of the answer is enough.
std::string ReadStatus(int socket, absl::Time until) {
  std::string answer;
  char part[256];
  while (!absl::StrContains(answer, "\r\n") && IsReady(socket, POLLIN, until)) {
    const ssize_t got = recv(socket, part, sizeof(part), 0);
    if (got <= 0) break;
    answer.append(part, static_cast<size_t>(got));
  }
  return answer;
}

// Whether the collector has taken it.
bool Post(const std::string& host, const std::string& port, const std::string& body) {
  const absl::Time until = SteadyNow() + SpanExport::kTimeout;
  const FileDescriptor socket = Connect(host, port, until);
  if (!socket.valid()) return false;
  const std::string header =
      absl::StrCat("POST ", kPath, " HTTP/1.1\r\nHost: ", host, ":", port,
                   "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
                   "\r\nConnection: close\r\n\r\n");
  if (!Send(socket.get(), header, until) || !Send(socket.get(), body, until)) return false;
  const std::string status = ReadStatus(socket.get(), until);
  return absl::StartsWith(status, "HTTP/1.1 2") || absl::StartsWith(status, "HTTP/1.0 2");
}

// Parses "http://host:port"; nothing for what is none.
std::optional<std::pair<std::string, std::string>> HostAndPort(absl::string_view endpoint) {
  if (!absl::ConsumePrefix(&endpoint, "http://")) return std::nullopt;
  absl::ConsumeSuffix(&endpoint, "/");
  const size_t colon = endpoint.rfind(':');
  if (colon == absl::string_view::npos || absl::StrContains(endpoint, "/")) return std::nullopt;
  const absl::string_view host =
      absl::StripSuffix(absl::StripPrefix(endpoint.substr(0, colon), "["), "]");
  int port = 0;
  const bool is_port = absl::SimpleAtoi(endpoint.substr(colon + 1), &port) && port > 0;
  if (host.empty() || !is_port || port > 65535) return std::nullopt;
  return std::pair{std::string(host), absl::StrCat(port)};
}

}  // namespace

std::string OtlpJson(const std::vector<CallSpan>& spans, const std::string& version) {
  absl::BitGen random;
  Json list = Json::array();
  for (const CallSpan& span : spans) {
    const std::string id = NewSpanId(random);
    Json whole =
        SpanOf(span.trace, id, span.trace.parent_id, span.name, kServer, span.begin, span.end);
    Json attributes = Json::array();
    for (const auto& [key, value] : span.attributes) attributes.push_back(Attribute(key, value));
    whole["attributes"] = std::move(attributes);
    if (!span.ok) whole["status"] = {{"code", kError}, {"message", span.error}};
    list.push_back(std::move(whole));
    for (const CallSpan::Stage& stage : span.stages) {
      list.push_back(
          SpanOf(span.trace, NewSpanId(random), id, stage.name, kInternal, stage.begin, stage.end));
    }
  }
  const Json resource = {{"attributes", Json::array({Attribute("service.name", "attnd"),
                                                     Attribute("service.version", version)})}};
  const Json scope = {{"scope", {{"name", "attnd"}}}, {"spans", std::move(list)}};
  const Json document = {{"resourceSpans", Json::array({{{"resource", resource},
                                                         {"scopeSpans", Json::array({scope})}}})}};
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::Status SpanExport::CheckEndpoint(const std::string& endpoint) {
  if (HostAndPort(endpoint).has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--otlp_endpoint: expected http://host:port of a collector, got \"", endpoint, "\""));
}

absl::StatusOr<std::unique_ptr<SpanExport>> SpanExport::Start(const std::string& endpoint,
                                                              const std::string& version) {
  RETURN_IF_ERROR(CheckEndpoint(endpoint));
  const auto [host, port] = *HostAndPort(endpoint);
  auto made = std::unique_ptr<SpanExport>(new SpanExport(host, port, version));
  made->thread_ = std::thread([made = made.get()] { made->Main(); });
  return made;
}

SpanExport::~SpanExport() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void SpanExport::Add(CallSpan span) {
  const absl::Duration to_wall = absl::Now() - SteadyNow();
  span.begin += to_wall;
  span.end += to_wall;
  for (CallSpan::Stage& stage : span.stages) {
    stage.begin += to_wall;
    stage.end += to_wall;
  }
  absl::MutexLock lock(&mutex_);
  if (waiting_.size() >= kMostWaiting) {
    ++dropped_;
  } else {
    waiting_.push_back(std::move(span));
  }
}

void SpanExport::Main() {
  bool last = false;
  while (!last) {
    std::vector<CallSpan> spans;
    {
      absl::MutexLock lock(&mutex_);
      auto full = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || waiting_.size() >= kMostAtOnce;
      };
      mutex_.AwaitWithTimeout(absl::Condition(&full), kPeriod);
      last = stopping_;
      const size_t count = std::min(waiting_.size(), kMostAtOnce);
      const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
      spans.assign(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(end));
      waiting_.erase(waiting_.begin(), end);
      if (last) dropped_ += static_cast<int64_t>(waiting_.size());
    }
    if (spans.empty()) continue;
    const auto count = static_cast<int64_t>(spans.size());
    (Post(host_, port_, OtlpJson(spans, version_)) ? exported_ : dropped_) += count;
  }
}

}  // namespace attnd
