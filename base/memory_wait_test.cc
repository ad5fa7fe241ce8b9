// Connections that wait for memory, over real sockets: they are not read, nothing is lost, and they
// can be ended.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/payload_receiver.h"
#include "base/receive_memory.h"

namespace attnd {
namespace {

constexpr int64_t kLimit = 64 << 20;
constexpr int kLongMs = 20000;
// A message of 100 MiB begins.
const std::string kGreeting =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
const std::string kBegins =
    std::string("\0\0\1\1\4\0\0\0\1h", 10) + std::string("\0\0\x6\0\0\0\0\0\1\0\6\x40\0\0x", 15);
const std::string kMore = std::string("\0\0\1\0\0\0\0\0\1x", 10);

class MemoryWait : public testing::TestWithParam<sa_family_t> {
 protected:
  MemoryWait() {
    used_ = 0;
    const int listener = socket(GetParam(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage at{};  // any address of the loopback device, or a name by the kernel
    at.ss_family = GetParam();
    socklen_t size = GetParam() == AF_UNIX ? sizeof(sa_family_t) : sizeof(sockaddr_in);
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&at), size) == 0);
    CHECK(listen(listener, 1) == 0);
    size = sizeof(at);
    CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    there_ = socket(GetParam(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(connect(there_, reinterpret_cast<sockaddr*>(&at), size) == 0);
    here_ = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(here_ >= 0);
    close(listener);
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    PayloadReceiver::Attach(here_, Http2Follower::Peer::kClient, nullptr, memory_);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLET;
    event.data.u64 = 1;
    CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, here_, &event) == 0);
    Send(kGreeting + kBegins);
    while (got_ < sent_) Poll(kLongMs);
  }
  ~MemoryWait() override {
    memory_->Stop();
    close(there_);
    close(here_);
    close(epoll_);
  }

  void Send(const std::string& bytes) {
    CHECK(send(there_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
    sent_ += bytes.size();
  }
  // Reads what the set tells of, as gRPC does. False: it told of nothing.
  bool Poll(int timeout_ms) {
    epoll_event event{};
    if (epoll_wait(epoll_, &event, 1, timeout_ms) != 1) return false;
    while ((last_ = Read()) > 0) got_ += static_cast<size_t>(last_);
    error_ = errno;
    return true;
  }
  void Wait() {
    used_ = kLimit;
    Send(kMore);
    while (memory_->waiting() == 0) Poll(kLongMs);
  }

  inline static std::atomic<int64_t> used_{0};  // a connection outlives its test
  std::shared_ptr<ReceiveMemory> memory_ = std::make_shared<ReceiveMemory>(
      kLimit, used_, [this](int socket, int64_t, int64_t) { told_of_ = socket; });
  int here_ = -1, there_ = -1, epoll_ = -1, told_of_ = -1;
  size_t sent_ = 0, got_ = 0;
  ssize_t last_ = 0;
  int error_ = 0;

 private:
  ssize_t Read() {
    char bytes[65536];
    iovec piece = {bytes, sizeof(bytes)};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    return ReceiveMessage(here_, &message, 0);
  }
};

INSTANTIATE_TEST_SUITE_P(Sockets, MemoryWait, testing::Values(AF_INET, AF_UNIX),
                         [](const auto& of) { return of.param == AF_UNIX ? "unix" : "tcp"; });

TEST_P(MemoryWait, IsReadWhenThereIsMemoryAgain) {
  Wait();
  EXPECT_EQ(sent_ - got_, kMore.size());
  Send(kMore);
  Poll(0);
  memory_->Look(HeldPeers::Time());
  Poll(0);
  EXPECT_EQ(sent_ - got_, 2 * kMore.size());
  used_ = 0;
  memory_->Look(HeldPeers::Time());
  EXPECT_TRUE(Poll(kLongMs));
  EXPECT_EQ(got_, sent_);
  Send(kMore);
  EXPECT_TRUE(Poll(kLongMs));
  EXPECT_EQ(got_, sent_);
}

TEST_P(MemoryWait, EndsWhenItsTimeIsOver) {
  Wait();
  memory_->Look(HeldPeers::Time() + ReceiveMemory::kPatience);
  EXPECT_EQ(told_of_, here_);
  EXPECT_TRUE(Poll(kLongMs));
  EXPECT_EQ(last_, -1);
  EXPECT_EQ(error_, ECONNRESET);
  char byte;
  EXPECT_EQ(recv(there_, &byte, 1, 0), 0);
}

TEST_P(MemoryWait, IsForgottenOnceItsSocketIsClosed) {
  Wait();
  close(here_);
  here_ = -1;
  memory_->Look(HeldPeers::Time());
  EXPECT_EQ(memory_->waiting(), 0);
}

// What it brings is known once gRPC has decrypted it.
TEST_P(MemoryWait, KnowsWhatEncryptedMessagesLack) {
  auto receiver = PayloadReceiver::Attach(here_, Http2Follower::Peer::kClient, nullptr, memory_);
  {
    PayloadReceiver::BeginningTls beginning(receiver);
    ASSERT_EQ(PayloadReceiver::BeginTls(), receiver);
  }
  used_ = kLimit / 2;
  Send("encrypted");
  EXPECT_TRUE(Poll(kLongMs));
  EXPECT_EQ(got_, sent_);
  const std::string bytes = kGreeting + kBegins;
  receiver->Decrypted({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  Send("encrypted");
  EXPECT_TRUE(Poll(kLongMs));
  EXPECT_LT(got_, sent_);
  EXPECT_EQ(memory_->waiting(), 1);
}

// Nothing is known of its messages.
TEST_P(MemoryWait, HoldsWhoPadsItsData) {
  Send(std::string("\0\0\4\0\x8\0\0\0\1\3pad", 13));
  while (got_ < sent_) Poll(kLongMs);
  used_ = kLimit / 2;
  Send(kMore);
  Poll(kLongMs);
  EXPECT_EQ(memory_->waiting(), 1);
}

}  // namespace
}  // namespace attnd
