#include "server/app/metrics_port.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
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

// What GET /metrics answers; empty when nobody listens, or answers in the time that Prometheus
// waits.
std::string Scrape(const char* host, int port) {
  const FileDescriptor socket = ConnectTo(host, port);
  if (!socket.valid()) return "";
  const timeval patience{.tv_sec = 10};
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  constexpr absl::string_view kGet = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(socket.get(), kGet.data(), kGet.size()), static_cast<ssize_t>(kGet.size()));
  std::string answer;
  char bytes[4096];
  for (ssize_t n; (n = read(socket.get(), bytes, sizeof(bytes))) > 0;) answer.append(bytes, n);
  return answer;
}

TEST(MetricsPort, ServesUntilItGoesAndNoLonger) {
  const Metrics metrics;
  for (const char* address : {"127.0.0.1:0", "0.0.0.0:0"}) {
    auto port = MetricsPort::Open(address, metrics);
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
  auto port = MetricsPort::Open("127.0.0.1:0", metrics);
  ASSERT_TRUE(port.ok()) << port.status();
  std::vector<FileDescriptor> silent;
  for (int n = 0; n < 16; ++n) silent.push_back(ConnectTo("127.0.0.1", (*port)->port()));
  const std::string text = Scrape("127.0.0.1", (*port)->port());
  EXPECT_TRUE(absl::StrContains(text, "attnd_requests_total"));
}

TEST(MetricsPort, SaysWhichAddressCannotBeListenedOn) {
  const Metrics metrics;
  auto first = MetricsPort::Open("127.0.0.1:0", metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  const absl::Status status = MetricsPort::Open(address, metrics).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(status.message(),
            "cannot listen for metrics: cannot listen on " + address + ": Address already in use");
}

}  // namespace
}  // namespace attnd
