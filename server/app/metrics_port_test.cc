#include "server/app/metrics_port.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "net/file_descriptor.h"

namespace attnd {
namespace {

// A connection to the port; holds nothing when nobody listens.
FileDescriptor ConnectTo(const char* host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host, std::to_string(port).c_str(), &hints, &found) != 0) return FileDescriptor();
  FileDescriptor socket(::socket(found->ai_family, SOCK_STREAM, 0));
  bool connected = connect(socket.get(), found->ai_addr, found->ai_addrlen) == 0;
  freeaddrinfo(found);
  return connected ? std::move(socket) : FileDescriptor();
}

const MetricsPort::Health kWell{.ready = [] { return true; },
                                .alive = [] { return absl::OkStatus(); }};

// Returns the answer to GET /metrics, or to another request; empty when nobody listens, or answers
// in the time that Prometheus waits.
std::string Scrape(const char* host, int port,
                   const std::string& request = "GET /metrics HTTP/1.0") {
  const FileDescriptor socket = ConnectTo(host, port);
  if (!socket.valid()) return "";
  const timeval patience{.tv_sec = 10};
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  const std::string lines = request + "\r\n\r\n";
  EXPECT_EQ(write(socket.get(), lines.data(), lines.size()), static_cast<ssize_t>(lines.size()));
  std::string answer;
  char bytes[4096];
  for (ssize_t n; (n = read(socket.get(), bytes, sizeof(bytes))) > 0;) answer.append(bytes, n);
  return answer;
}

TEST(MetricsPort, ServesUntilItGoesAndNoLonger) {
  const Metrics metrics;
  for (const char* address : {"127.0.0.1:0", "0.0.0.0:0"}) {
    auto port = MetricsPort::Open(address, metrics, kWell);
    ASSERT_TRUE(port.ok()) << port.status();
    const int number = (*port)->port();
    const std::string text = Scrape("127.0.0.1", number);
    EXPECT_TRUE(absl::StrContains(text, "attnd_requests_total"));
    EXPECT_TRUE(absl::StrContains(text, "process_threads"));
    port->reset();
    EXPECT_EQ(Scrape("127.0.0.1", number), "");
  }
}

TEST(MetricsPort, AnswersBesideConnectionsThatAskForNothing) {
  const Metrics metrics;
  auto port = MetricsPort::Open("127.0.0.1:0", metrics, kWell);
  ASSERT_TRUE(port.ok()) << port.status();
  std::vector<FileDescriptor> silent;
  for (int n = 0; n < 500; ++n) {
    silent.push_back(ConnectTo("127.0.0.1", (*port)->port()));
    ASSERT_TRUE(silent.back().valid());
    if (n % 2 == 0) {  // and no more
      EXPECT_EQ(write(silent.back().get(), "GET /", 5), 5);
    }
  }
  // The fastest of some: this machine may be busy.
  absl::Duration fastest = absl::InfiniteDuration();
  for (int n = 0; n < 5; ++n) {
    const absl::Time begun = absl::Now();
    const std::string text = Scrape("127.0.0.1", (*port)->port());
    fastest = std::min(fastest, absl::Now() - begun);
    EXPECT_TRUE(absl::StrContains(text, "attnd_requests_total"));
  }
  EXPECT_LT(fastest, absl::Milliseconds(100));
}

TEST(MetricsPort, MakesRoomForNewConnectionsBesideTooManySilentOnes) {
  const Metrics metrics;
  auto port = MetricsPort::Open("127.0.0.1:0", metrics, kWell);
  ASSERT_TRUE(port.ok()) << port.status();
  std::vector<FileDescriptor> silent;
  for (size_t n = 0; n < PageServer::kMostConnections + 50; ++n) {
    silent.push_back(ConnectTo("127.0.0.1", (*port)->port()));
    ASSERT_TRUE(silent.back().valid());
  }
  EXPECT_TRUE(
      absl::EndsWith(Scrape("127.0.0.1", (*port)->port(), "GET /healthz HTTP/1.0"), "ok\n"));
  char byte = 0;
  EXPECT_EQ(read(silent.front().get(), &byte, 1), 0);  // the oldest has been closed
}

TEST(MetricsPort, ClosesConnectionsThatDoNotAsk) {
  const Metrics metrics;
  auto port = MetricsPort::Open("127.0.0.1:0", metrics, kWell);
  ASSERT_TRUE(port.ok()) << port.status();
  const FileDescriptor silent = ConnectTo("127.0.0.1", (*port)->port());
  char byte = 0;
  EXPECT_EQ(read(silent.get(), &byte, 1), 0);  // after two seconds
}

// None is lost to a reset, which closing a socket with unread bytes would send.
TEST(MetricsPort, AnswersRequestsThatAreTooLongOrFollowedByMore) {
  const Metrics metrics;
  auto port = MetricsPort::Open("127.0.0.1:0", metrics, kWell);
  ASSERT_TRUE(port.ok()) << port.status();
  for (int n = 0; n < 20; ++n) {
    const std::string endless = Scrape("127.0.0.1", (*port)->port(), std::string(200'000, 'x'));
    EXPECT_TRUE(absl::StartsWith(endless, "HTTP/1.1 431 ")) << endless;
    const std::string two = Scrape(
        "127.0.0.1", (*port)->port(),
        "GET /healthz HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\nX: " + std::string(100'000, 'x'));
    EXPECT_TRUE(absl::StartsWith(two, "HTTP/1.1 200 ") && absl::EndsWith(two, "\r\n\r\nok\n"))
        << two;
    const std::string posted =
        Scrape("127.0.0.1", (*port)->port(), "POST / HTTP/1.1\r\n\r\n" + std::string(100'000, 'x'));
    EXPECT_TRUE(
        absl::StartsWith(posted, "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\n"));
  }
}

TEST(PageServer, AnswersPeersThatReadSlowlyOrHaveClosedTheirHalf) {
  const std::string body(size_t{20} << 20, 'b');  // more than sockets hold
  auto server =
      PageServer::Open("127.0.0.1:0", [&](absl::string_view) { return Page{.body = body}; });
  ASSERT_TRUE(server.ok()) << server.status();
  const FileDescriptor slow = ConnectTo("127.0.0.1", (*server)->port());
  const std::string request = "GET / HTTP/1.1\r\n\r\n";
  ASSERT_EQ(write(slow.get(), request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  ASSERT_EQ(shutdown(slow.get(), SHUT_WR), 0);
  // Another request comes in pieces at the same time.
  const FileDescriptor other = ConnectTo("127.0.0.1", (*server)->port());
  for (const char byte : request) ASSERT_EQ(write(other.get(), &byte, 1), 1);
  for (const FileDescriptor* peer : {&other, &slow}) {
    std::string answer;
    std::vector<char> bytes(size_t{1} << 20);
    for (ssize_t n; (n = read(peer->get(), bytes.data(), bytes.size())) > 0;) {
      answer.append(bytes.data(), static_cast<size_t>(n));
    }
    EXPECT_GT(answer.size(), body.size());
    EXPECT_TRUE(absl::EndsWith(answer, body));
  }
}

TEST(MetricsPort, ShowsAPageAndWhetherItIsReadyAndAlive) {
  const Metrics metrics;
  std::atomic<bool> ready = true, alive = true;
  auto port = MetricsPort::Open(
      "127.0.0.1:0", metrics,
      {.ready = [&] { return ready.load(); },
       .alive = [&] { return alive ? absl::OkStatus() : absl::InternalError("gpu0: stuck"); }});
  ASSERT_TRUE(port.ok()) << port.status();
  auto ask = [&](const std::string& request) {
    return Scrape("127.0.0.1", (*port)->port(), request + " HTTP/1.0");
  };
  const std::string page = ask("GET /");
  EXPECT_TRUE(absl::StartsWith(page, "HTTP/1.1 200 OK\r\nContent-Type: text/html")) << page;
  EXPECT_TRUE(absl::EndsWith(page, "</html>\n"));
  EXPECT_LE(page.size(), size_t{50} << 10);
  for (const char* elsewhere : {"http:", "https:", "src=", "@import", "innerHTML"}) {
    EXPECT_FALSE(absl::StrContains(page, elsewhere)) << elsewhere;
  }
  EXPECT_TRUE(absl::EndsWith(ask("GET /healthz"), "\r\n\r\nok\n"));
  ready = false;
  EXPECT_TRUE(absl::StartsWith(ask("GET /healthz"), "HTTP/1.1 503 ")) << ask("GET /healthz");
  EXPECT_TRUE(absl::StartsWith(ask("GET /livez"), "HTTP/1.1 200 OK"));  // a drain needs no restart
  alive = false;
  EXPECT_TRUE(absl::StartsWith(ask("GET /livez"), "HTTP/1.1 503 "));
  EXPECT_TRUE(absl::EndsWith(ask("GET /livez"), "\r\n\r\ngpu0: stuck\n"));
  for (const char* path : {"/", "/metrics", "/healthz"}) {
    const std::string head = ask(absl::StrCat("HEAD ", path));
    EXPECT_TRUE(absl::StartsWith(head, path[1] == 'h' ? "HTTP/1.1 503 " : "HTTP/1.1 200 OK"));
    EXPECT_TRUE(absl::EndsWith(head, "\r\n\r\n")) << head;
  }
  for (const char* request :
       {"GET /metrics/x", "GET /../etc/passwd", "POST /", "DELETE /metrics"}) {
    const std::string answer = ask(request);
    EXPECT_TRUE(absl::StrContains(answer.substr(0, 10), " 4")) << request << answer;
  }
}

TEST(MetricsPort, SaysWhichAddressCannotBeListenedOn) {
  const Metrics metrics;
  auto first = MetricsPort::Open("127.0.0.1:0", metrics, kWell);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  const absl::Status status = MetricsPort::Open(address, metrics, kWell).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(status.message(),
            "--metrics_listen: cannot listen on " + address + ": Address already in use");
}

}  // namespace
}  // namespace attnd
