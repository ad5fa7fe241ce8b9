// What a server may send at once on a connection of a program's client, seen from the wire.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file_descriptor.h"
#include "client/cpp/attention_client.h"
#include "client/cpp/connections.h"

namespace attnd {
namespace {

// A port that takes one connection and hears what comes first.
class Port {
 public:
  Port() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&at), size) == 0);
    CHECK(listen(listener_.get(), 1) == 0);
    CHECK(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
  }
  const std::string& address() const { return address_; }

  // HTTP/2's greeting, and the frames that a client sends together with it.
  std::string Greeting() {
    FileDescriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    char bytes[4096];
    const ssize_t size = recv(connection.get(), bytes, sizeof(bytes), 0);
    CHECK(size > 0);
    return std::string(bytes, static_cast<size_t>(size));
  }

 private:
  FileDescriptor listener_;
  std::string address_;
};

TEST(FirstWindow, HoldsTheReplyOfASmallCall) {
  Port port;
  auto client = AttentionClient::Connect({.addresses = {port.address()}});
  ASSERT_TRUE(client.ok());
  std::thread caller([&] { EXPECT_FALSE((*client)->GetServerInfo(0, {}).ok()); });
  const std::string greeting = port.Greeting();
  caller.join();
  constexpr char kWindowUpdate = 8;
  const std::string frame = {0, 0, 4, kWindowUpdate, 0, 0, 0, 0, 0};  // of the connection
  const size_t at = greeting.find(frame);
  ASSERT_NE(at, std::string::npos);
  int64_t window = 0;
  for (size_t n = 0; n < 4; ++n) {
    window = window << 8 | static_cast<uint8_t>(greeting[at + frame.size() + n]);
  }
  EXPECT_GE(window + 65535, Connections::kSmallCallBytes + 4096);  // and its header
}

}  // namespace
}  // namespace attnd
