#include "server/app/page_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr std::chrono::seconds kRequestTime(2), kReplyTime(10), kLingerTime(1);
constexpr size_t kMostRequestBytes = 8192;
constexpr absl::string_view kEndOfHead = "\r\n\r\n";

// The page needs nothing from elsewhere, and may ask this port alone.
std::string Framed(const Page& page, bool with_body) {
  return absl::StrCat("HTTP/1.1 ", page.status, "\r\nContent-Type: ", page.type,
                      "\r\nContent-Length: ", page.body.size(),
                      "\r\nCache-Control: no-store\r\nConnection: close\r\n"
                      "Content-Security-Policy: default-src 'self' 'unsafe-inline'\r\n"
                      "X-Content-Type-Options: nosniff",
                      kEndOfHead, with_body ? page.body : "");
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageServer>> PageServer::Open(const std::string& address,
                                                             Answer answer) {
  ASSIGN_OR_RETURN(std::unique_ptr<Listener> listener, Listener::Open(address, absl::Seconds(20)));
  return std::unique_ptr<PageServer>(new PageServer(std::move(listener), std::move(answer)));
}

PageServer::PageServer(std::unique_ptr<Listener> listener, Answer answer)
    : listener_(std::move(listener)),
      answer_(std::move(answer)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  CHECK(wake_.valid()) << "eventfd";
  thread_ = std::thread([this] { Main(); });
  listener_->Start([this](int socket) {
    {
      absl::MutexLock lock(&mutex_);
      new_.emplace_back(socket);
    }
    eventfd_write(wake_.get(), 1);
  });
}

PageServer::~PageServer() {
  listener_->Stop();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void PageServer::Main() {
  std::vector<pollfd> waits;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    TakeNewOnes();
    waits.assign(1, {wake_.get(), POLLIN, 0});
    Instant next = Instant::max();
    for (const Connection& one : connections_) {
      const bool reads = one.reply.empty() || one.is_answered;
      const auto events = static_cast<int16_t>(reads ? POLLIN : POLLOUT);
      waits.push_back({one.socket.get(), events, 0});
      next = std::min(next, one.until);
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(next - std::chrono::steady_clock::now());
    const int ms =
        next == Instant::max() ? -1 : static_cast<int>(std::max<int64_t>(left.count(), 0));
    if (poll(waits.data(), waits.size(), ms) < 0) continue;  // a signal
    const Instant now = std::chrono::steady_clock::now();
    size_t n = 1;
    for (auto one = connections_.begin(); one != connections_.end(); ++n) {
      const bool is_over = (waits[n].revents != 0 && !Go(*one)) || one->until <= now;
      one = is_over ? connections_.erase(one) : std::next(one);
    }
  }
}

void PageServer::TakeNewOnes() {
  eventfd_t number = 0;
  eventfd_read(wake_.get(), &number);
  std::vector<FileDescriptor> sockets;
  {
    absl::MutexLock lock(&mutex_);
    sockets.swap(new_);
  }
  for (FileDescriptor& socket : sockets) {
    MakeRoom();
    connections_.push_back(
        {.socket = std::move(socket), .until = std::chrono::steady_clock::now() + kRequestTime});
  }
}

void PageServer::MakeRoom() {
  if (connections_.size() < kMostConnections) return;
  const auto silent =
      std::find_if(connections_.begin(), connections_.end(),
                   [](const Connection& one) { return one.reply.empty() || one.is_answered; });
  connections_.erase(silent == connections_.end() ? connections_.begin() : silent);
}

bool PageServer::Go(Connection& connection) {
  if (connection.is_answered) return DropRest(connection);
  if (connection.reply.empty() && !ReadRequest(connection)) return false;
  while (connection.sent < connection.reply.size()) {
    const ssize_t put = send(connection.socket.get(), connection.reply.data() + connection.sent,
                             connection.reply.size() - connection.sent, MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN || errno == EINTR;
    connection.sent += static_cast<size_t>(put);
  }
  if (connection.reply.empty()) return true;  // it has not asked yet
  shutdown(connection.socket.get(), SHUT_WR);
  connection.is_answered = true;
  connection.until = std::chrono::steady_clock::now() + kLingerTime;
  return true;
}

// Until the peer closes too: a socket that is closed before all was read resets its connection, and
// the peer may lose the reply by that.
bool PageServer::DropRest(const Connection& connection) {
  char bytes[4096];
  const ssize_t got = recv(connection.socket.get(), bytes, sizeof(bytes), 0);
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

bool PageServer::ReadRequest(Connection& connection) {
  char bytes[4096];
  const ssize_t got = recv(connection.socket.get(), bytes, sizeof(bytes), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  connection.request.append(bytes, static_cast<size_t>(got));
  if (absl::StrContains(connection.request, kEndOfHead)) {
    connection.reply = ReplyTo(connection.request);
  } else if (connection.request.size() > kMostRequestBytes) {
    connection.reply = Framed({.status = "431 Request Header Fields Too Large"}, false);
  }
  if (!connection.reply.empty()) {
    connection.until = std::chrono::steady_clock::now() + kReplyTime;
  }
  return true;
}

std::string PageServer::ReplyTo(absl::string_view request) const {
  const absl::string_view line = request.substr(0, request.find("\r\n"));
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
  if (words.size() != 3) return Framed({.status = "400 Bad Request"}, true);
  if (words[0] != "GET" && words[0] != "HEAD") {
    return Framed({.status = "405 Method Not Allowed\r\nAllow: GET, HEAD"}, true);
  }
  return Framed(answer_(words[1].substr(0, words[1].find('?'))), words[0] == "GET");
}

}  // namespace attnd
