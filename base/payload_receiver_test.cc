#include "base/payload_receiver.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace attnd {
namespace {

std::string Number(uint64_t value, int bytes) {
  std::string text;
  for (int n = bytes - 1; n >= 0; --n) text += static_cast<char>(value >> (8 * n));
  return text;
}
std::string Frame(int type, uint32_t stream, const std::string& payload) {
  return Number(payload.size(), 3) + Number(type, 1) + Number(0, 1) + Number(stream, 4) + payload;
}
std::string Message(const std::string& bytes) { return Number(bytes.size(), 5) + bytes; }

const std::string kStart = Frame(4, 0, "") + Frame(1, 1, "headers");
const std::string kFirst = Frame(0, 1, Message("first"));

class OnePlace final : public MessagePlacer {
 public:
  explicit OnePlace(size_t bytes) : memory(bytes, '-') {}
  std::byte* PlaceOf(int64_t, absl::Span<const uint8_t> beginning, int64_t bytes,
                     int64_t came) override {
    if (bytes > static_cast<int64_t>(memory.size())) return nullptr;
    std::copy(beginning.begin(), beginning.end(), memory.begin());
    return reinterpret_cast<std::byte*>(memory.data()) + came;
  }
  void OnPlaced(int64_t) override { ++placed; }
  std::string memory;
  int placed = 0;
};

class PayloadReceiverTest : public testing::Test {
 protected:
  PayloadReceiverTest() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets_), 0);
    receiver_ = PayloadReceiver::Attach(sockets_[0], Http2Follower::Peer::kServer);
  }
  ~PayloadReceiverTest() override {
    for (int socket : sockets_) close(socket);
  }

  void Send(const std::string& bytes) {
    if (sender_.joinable()) sender_.join();
    sender_ = std::thread([this, bytes] {
      for (size_t at = 0; at < bytes.size();) {
        ssize_t sent = send(sockets_[1], bytes.data() + at, bytes.size() - at, 0);
        ASSERT_GT(sent, 0);
        at += static_cast<size_t>(sent);
      }
    });
  }
  // As gRPC does: into slices, until so many bytes have come.
  std::string Receive(size_t bytes, size_t slice = 7000) {
    std::string all;
    while (all.size() < bytes) {
      std::vector<std::string> slices(20, std::string(slice, '.'));
      std::vector<iovec> pieces;
      for (std::string& s : slices) pieces.push_back({s.data(), s.size()});
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = pieces.size();
      ssize_t got = recvmsg(sockets_[0], &message, 0);
      EXPECT_GT(got, 0);
      if (got <= 0) break;
      std::string whole;
      for (const std::string& s : slices) whole += s;
      all += whole.substr(0, static_cast<size_t>(got));
    }
    if (sender_.joinable()) sender_.join();
    return all;
  }
  // Of a stream's first message, in memory that stays.
  const void* ReceiveFirst() {
    Send(kStart);
    Receive(kStart.size());
    Send(kFirst);
    first_.resize(kFirst.size());
    iovec piece{first_.data(), first_.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    EXPECT_EQ(recvmsg(sockets_[0], &message, 0), static_cast<ssize_t>(kFirst.size()));
    sender_.join();
    return first_.data() + 9 + 5;
  }

  int sockets_[2];
  std::shared_ptr<PayloadReceiver> receiver_;
  std::string first_;
  std::thread sender_;
};

TEST_F(PayloadReceiverTest, ReadsAPlacedMessagePastTheReadersMemory) {
  OnePlace place(300000);
  const void* first = ReceiveFirst();
  auto placing = receiver_->Place(first, place);
  ASSERT_NE(placing, nullptr);
  std::string payload(300000, 0);
  for (size_t n = 0; n < payload.size(); ++n) payload[n] = static_cast<char>(n * 31 >> 3);
  const std::string after = Frame(8, 0, "1234");
  const std::string frame = Frame(0, 1, Message(payload)) + after;
  Send(frame);
  const int64_t before = PayloadReceiver::PlacedBytes();
  const std::string got = Receive(frame.size());
  EXPECT_EQ(place.memory, payload);
  EXPECT_GT(PayloadReceiver::PlacedBytes(), before);
  EXPECT_EQ(place.placed, 1);
  ASSERT_EQ(got.size(), frame.size());
  EXPECT_EQ(got.substr(0, 14), frame.substr(0, 14));
  EXPECT_EQ(got.substr(got.size() - after.size()), after);
  EXPECT_EQ(got.substr(14 + 1000, 1000), std::string(1000, '.')) << "it was copied there too";
}

TEST_F(PayloadReceiverTest, FindsAConnectionByItsPeersName) {
  OnePlace place(10);
  const void* first = ReceiveFirst();
  EXPECT_EQ(PlaceMessagesFrom("ipv4:127.0.0.1:70", first, place), nullptr);
  EXPECT_EQ(PlaceMessagesFrom("unix:", first_.data(), place), nullptr);
  EXPECT_NE(PlaceMessagesFrom("unix:", first, place), nullptr);
}

// A call that is refused leaves its stream and gives its memory back, which the next one gets.
TEST_F(PayloadReceiverTest, TakesTheConnectionThatUsedTheMemoryLast) {
  const void* first = ReceiveFirst();
  int refused[2] = {sockets_[0], sockets_[1]};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets_), 0);
  auto receiver = PayloadReceiver::Attach(sockets_[0], Http2Follower::Peer::kServer);
  ASSERT_EQ(ReceiveFirst(), first) << "not the same memory";
  OnePlace place(100000);
  auto placing = PlaceMessagesFrom("unix:", first, place);
  ASSERT_NE(placing, nullptr);
  std::swap(sockets_, refused);
  const std::string stale = Frame(0, 1, Message(std::string(100000, 's')));
  Send(stale);
  EXPECT_EQ(Receive(stale.size()), stale);
  EXPECT_EQ(place.memory, std::string(100000, '-'));
  EXPECT_EQ(place.placed, 0);
  std::swap(sockets_, refused);
  const std::string own = Frame(0, 1, Message(std::string(100000, 'o')));
  Send(own);
  Receive(own.size());
  EXPECT_EQ(place.memory, std::string(100000, 'o'));
  for (int socket : refused) close(socket);
}

// Its messages are not known, and one may lie where another connection's stream had its first.
TEST_F(PayloadReceiverTest, GivesACallOfAnUnfollowedConnectionNoOthersStream) {
  const std::string settings = Frame(4, 0, "");
  const std::string padded = std::string("\0\0\4\0\x8\0\0\0\1pad!", 13);
  struct Case {
    const char* name;
    bool attached;
    std::string before, with;  // what is received before the message, and in one read with it
    bool found;                // the first stream
  };
  const Case cases[] = {{"followed, and silent", true, "", "", true},
                        {"not attached", false, settings, "", false},
                        {"lost", true, settings + padded, "", false},
                        {"lost with the same read", true, settings, padded, false},
                        {"no HTTP/2", true, "HTTP/1.1 400 Bad Request", "", false}};
  OnePlace place(10);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    receiver_ = PayloadReceiver::Attach(sockets_[0], Http2Follower::Peer::kServer);
    const void* first = ReceiveFirst();
    int other[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, other), 0);
    if (c.attached) PayloadReceiver::Attach(other[0], Http2Follower::Peer::kServer);
    auto receive = [&](const std::string& bytes, void* memory, size_t size) {
      ASSERT_EQ(send(other[1], bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
      iovec piece{memory, size};
      msghdr message{};
      message.msg_iov = &piece;
      message.msg_iovlen = 1;
      ASSERT_GT(recvmsg(other[0], &message, 0), 0);
    };
    char beside[100];
    if (!c.before.empty()) receive(c.before, beside, sizeof(beside));
    if (!c.found) receive(c.with + kFirst, first_.data(), first_.size());
    EXPECT_EQ(PlaceMessagesFrom("unix:", first, place) != nullptr, c.found);
    for (int socket : other) close(socket);
  }
}

TEST_F(PayloadReceiverTest, ForgetsItsStreamsWhenTheConnectionEnds) {
  OnePlace place(10);
  const void* first = ReceiveFirst();
  EXPECT_TRUE(receiver_->Holds(first));
  shutdown(sockets_[1], SHUT_WR);
  char byte;
  iovec piece{&byte, 1};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  EXPECT_EQ(recvmsg(sockets_[0], &message, 0), 0);
  EXPECT_FALSE(receiver_->Holds(first));
  EXPECT_EQ(PlaceMessagesFrom("unix:", first, place), nullptr);
}

TEST_F(PayloadReceiverTest, FollowsOnWhenNothingIsAskedFor) {
  OnePlace place(300000);
  auto placing = receiver_->Place(ReceiveFirst(), place);
  const std::string frame = Frame(0, 1, Message(std::string(300000, 'x')));
  Send(frame.substr(0, 100000));
  Receive(100000);
  msghdr nothing{};
  ASSERT_EQ(fcntl(sockets_[0], F_SETFL, O_NONBLOCK), 0);
  EXPECT_LE(recvmsg(sockets_[0], &nothing, 0), 0);
  ASSERT_EQ(fcntl(sockets_[0], F_SETFL, 0), 0);
  Send(frame.substr(100000));
  Receive(frame.size() - 100000);
  EXPECT_EQ(place.placed, 1);
}

TEST_F(PayloadReceiverTest, LeavesMemoryAloneOnceThePlacingIsGone) {
  OnePlace place(100000);
  const void* first = ReceiveFirst();
  auto placing = receiver_->Place(first, place);
  ASSERT_NE(placing, nullptr);
  placing.reset();
  const std::string frame = Frame(0, 1, Message(std::string(100000, 'p')));
  Send(frame);
  EXPECT_EQ(Receive(frame.size()), frame);
  EXPECT_EQ(place.memory, std::string(100000, '-'));
}

TEST_F(PayloadReceiverTest, LetsAnotherSocketOfTheSameNumberBe) {
  OnePlace place(100000);
  const void* first = ReceiveFirst();
  auto placing = receiver_->Place(first, place);
  ASSERT_NE(placing, nullptr);
  int other[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, other), 0);
  ASSERT_EQ(dup2(other[0], sockets_[0]), sockets_[0]);
  ASSERT_EQ(dup2(other[1], sockets_[1]), sockets_[1]);
  for (int socket : other) close(socket);
  const std::string frame = Frame(0, 1, Message(std::string(100000, 'p')));
  Send(frame);
  EXPECT_EQ(Receive(frame.size()), frame);
  EXPECT_EQ(place.memory, std::string(100000, '-'));
}

TEST_F(PayloadReceiverTest, GivesErrorsControlMessagesAndTheEndAsTheyAre) {
  char byte;
  iovec piece{&byte, 1};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  EXPECT_EQ(recvmsg(sockets_[0], &message, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
  char control[100];  // what stands beside the bytes: here nothing
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ASSERT_EQ(send(sockets_[1], "x", 1, 0), 1);
  EXPECT_EQ(recvmsg(sockets_[0], &message, 0), 1);
  EXPECT_EQ(message.msg_controllen, 0u);
  shutdown(sockets_[1], SHUT_WR);
  EXPECT_EQ(recvmsg(sockets_[0], &message, 0), 0);
}

}  // namespace
}  // namespace attnd
