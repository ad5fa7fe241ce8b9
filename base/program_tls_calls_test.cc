// TLS as gRPC does it, between a socket and a pair of memory BIOs, against a peer that decides what
// comes in one piece.
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/payload_receiver.h"

namespace attnd {
namespace {

const std::string kGreeting =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
const std::string kSettings("\0\0\0\4\0\0\0\0\0", 9), kAcknowledgement("\0\0\0\4\1\0\0\0\0", 9);

std::string Calls(int count) {
  const std::string call = std::string("\0\0\7\1\5\0\0\0\1", 9) + "headers";  // with its end
  std::string calls;
  for (int n = 0; n < count; ++n) calls += call;
  return calls;
}

// One end's TLS; keys are agreed upon, so nobody needs a certificate.
class Tls {
 public:
  explicit Tls(bool is_server)
      : context_(SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method())) {
    SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION);
    SSL_CTX_set_psk_server_callback(context_, [](SSL*, const char*, unsigned char* key, unsigned) {
      std::fill_n(key, 32, 'k');
      return 32U;
    });
    SSL_CTX_set_psk_client_callback(
        context_, [](SSL*, const char*, char* name, unsigned, unsigned char* key, unsigned) {
          std::copy_n("me", 3, name);
          std::fill_n(key, 32, 'k');
          return 32U;
        });
    ssl_ = SSL_new(context_);
    SSL_set_bio(ssl_, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    is_server ? SSL_set_accept_state(ssl_) : SSL_set_connect_state(ssl_);
  }
  ~Tls() {
    SSL_free(ssl_);
    SSL_CTX_free(context_);
  }

  void Shake() { SSL_do_handshake(ssl_); }
  bool is_ready() const { return SSL_is_init_finished(ssl_); }
  void Take(const std::string& encrypted) {
    const int size = static_cast<int>(encrypted.size());
    CHECK(BIO_write(SSL_get_rbio(ssl_), encrypted.data(), size) == size);
  }
  std::string Read() {
    std::string bytes(1 << 16, 0);
    const int got = SSL_read(ssl_, bytes.data(), static_cast<int>(bytes.size()));
    return bytes.substr(0, static_cast<size_t>(std::max(got, 0)));
  }
  void Write(const std::string& bytes) {
    const int size = static_cast<int>(bytes.size());
    CHECK(SSL_write(ssl_, bytes.data(), size) == size);
  }
  // That is to be sent.
  std::string Encrypted() {
    std::string bytes(1 << 16, 0);
    const int got = BIO_read(SSL_get_wbio(ssl_), bytes.data(), static_cast<int>(bytes.size()));
    return bytes.substr(0, static_cast<size_t>(std::max(got, 0)));
  }

 private:
  SSL_CTX* const context_;
  SSL* ssl_;
};

class ProgramTlsCalls : public testing::Test {
 protected:
  ProgramTlsCalls() {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&at), size) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    CHECK(connect(there_, reinterpret_cast<sockaddr*>(&at), size) == 0);
    here_ = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    close(listener);
    auto receiver = PayloadReceiver::Attach(here_, Http2Follower::Peer::kClient, held_);
    PayloadReceiver::BeginningTls beginning(std::move(receiver));
    server_ = std::make_unique<Tls>(true);
  }
  ~ProgramTlsCalls() override {
    held_->Stop();
    close(here_);
    close(there_);
  }

  // The peer can send, and its part of the handshake is not sent yet.
  void ShakeOnce() {
    client_.Shake();
    ServerTakes(client_.Encrypted());
    server_->Shake();
    ServerSends();
    client_.Shake();
    ASSERT_TRUE(client_.is_ready());
  }
  void ServerTakes(const std::string& encrypted) {
    CHECK(send(there_, encrypted.data(), encrypted.size(), 0) ==
          static_cast<ssize_t>(encrypted.size()));
    std::string bytes(encrypted.size(), 0);
    iovec piece = {bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    for (size_t got = 0; got < bytes.size(); piece = {bytes.data() + got, bytes.size() - got}) {
      const ssize_t more = ReceiveMessage(here_, &message, 0);
      CHECK(more > 0);
      got += static_cast<size_t>(more);
    }
    server_->Take(bytes);
  }
  // And returns once the peer's kernel has it.
  void ServerSends() {
    const std::string encrypted = server_->Encrypted();
    CHECK(send(here_, encrypted.data(), encrypted.size(), 0) ==
          static_cast<ssize_t>(encrypted.size()));
    std::string bytes(encrypted.size(), 0);
    CHECK(recv(there_, bytes.data(), bytes.size(), MSG_WAITALL) ==
          static_cast<ssize_t>(bytes.size()));
    client_.Take(bytes);
    for (int left = 1; left > 0;) CHECK(ioctl(here_, SIOCOUTQ, &left) == 0);
  }
  // What has been decrypted is looked at with the next read.
  void ReadOnce() {
    char byte;
    iovec piece = {&byte, 1};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    CHECK(send(there_, "x", 1, 0) == 1);
    ReceiveMessage(here_, &message, 0);
  }

  const std::shared_ptr<HeldPeers> held_ =
      std::make_shared<HeldPeers>(WastedWork::Limits{.frames_per_second = 200}, nullptr);
  const int there_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int here_ = -1;
  std::unique_ptr<Tls> server_;
  Tls client_{false};
};

TEST_F(ProgramTlsCalls, LetWhoAcknowledgesSettingsThatCameCallALot) {
  ShakeOnce();
  client_.Write(kGreeting);
  ServerTakes(client_.Encrypted());
  server_->Shake();
  ServerSends();
  server_->Write(kSettings);
  ServerSends();
  EXPECT_EQ(server_->Read(), kGreeting);
  client_.Write(kAcknowledgement + Calls(100));
  ServerTakes(client_.Encrypted());
  EXPECT_EQ(server_->Read(), kAcknowledgement + Calls(100));
  ReadOnce();
  EXPECT_EQ(held_->now(), 0);
}

// The handshake has been answered, but the settings have not been sent: nobody knows of a limit.
TEST_F(ProgramTlsCalls, HoldWhoAcknowledgesSettingsBeforeTheyCome) {
  ShakeOnce();
  client_.Write(kGreeting + kAcknowledgement + Calls(100));
  ServerTakes(client_.Encrypted());
  server_->Shake();
  ServerSends();
  EXPECT_EQ(server_->Read(), kGreeting + kAcknowledgement + Calls(100));
  ReadOnce();
  EXPECT_EQ(held_->now(), 1);
}

TEST_F(ProgramTlsCalls, HoldWhoAcknowledgesSettingsOnTheirWay) {
  ShakeOnce();
  client_.Write(kGreeting + kAcknowledgement + Calls(100));
  ServerTakes(client_.Encrypted());
  server_->Shake();
  ServerSends();
  server_->Write(kSettings);
  EXPECT_EQ(server_->Read(), kGreeting + kAcknowledgement + Calls(100));
  ReadOnce();
  EXPECT_EQ(held_->now(), 1);
}

}  // namespace
}  // namespace attnd
