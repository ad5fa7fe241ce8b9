#include "base/own_sockets.h"

#include <grpcpp/alarm.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/event_threads.h"
#include "base/generic_echo.h"
#include "base/payload_receiver.h"

namespace attnd {
namespace {

constexpr size_t kMuch = 1 << 20, kLittle = 100;

std::string Bytes(size_t count, int seed) {
  std::string bytes(count, 0);
  for (size_t n = 0; n < count; ++n)
    bytes[n] = static_cast<char>(n * 31 + static_cast<size_t>(seed));
  return bytes;
}

std::string TextOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  CHECK(buffer.Dump(&slices).ok());
  std::string text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

// A server and connections to it, whose both ends this process follows.
class OwnSocketsTest : public testing::Test {
 protected:
  OwnSocketsTest() {
    grpc::ServerBuilder builder;
    builder.RegisterCallbackGenericService(&echo_);
    builder.SetMaxReceiveMessageSize(-1);
    server_ = builder.BuildAndStart();
  }
  ~OwnSocketsTest() override { server_->Shutdown(); }

  std::shared_ptr<grpc::Channel> Connect() {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    PayloadReceiver::Attach(pair[0], Http2Follower::Peer::kClient);
    PayloadReceiver::Attach(pair[1], Http2Follower::Peer::kServer);
    grpc::AddInsecureChannelFromFd(server_.get(), pair[0]);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomInsecureChannelFromFd("there", pair[1], arguments);
  }

  static void Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& bytes) {
    grpc::ByteBuffer reply;
    const grpc::Status status = CallEcho(channel, bytes, reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(!status.ok() || TextOf(reply) == bytes) << bytes.size();
  }

  void OnMessage(const grpc::ByteBuffer& message) {
    {
      absl::MutexLock lock(&mutex_);
      last_ = std::this_thread::get_id();
    }
    if (message.Length() != kMuch) return;
    ++inside_;
    while (inside_ < together_) std::this_thread::yield();
  }
  // Who took the last message.
  std::thread::id last() {
    absl::MutexLock lock(&mutex_);
    return last_;
  }

  EventThreads threads_{16};  // for both ends of all connections
  // A message of kMuch waits in its callback until so many are there.
  std::atomic<int> together_{1}, inside_{0};
  absl::Mutex mutex_;
  std::thread::id last_ ABSL_GUARDED_BY(mutex_);
  GenericEcho echo_{[this](const grpc::ByteBuffer& message) { OnMessage(message); }};
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(OwnSocketsTest, ConnectionsThatMoveMuchAreServedAtTheSameTimeWithoutTheOthersThreads) {
  constexpr int kConnections = 4;
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int n = 0; n < kConnections; ++n) {
    channels.push_back(Connect());
    Call(channels.back(), Bytes(kMuch, n));  // from here on it moves much
  }
  for (int round = 0; round < 5; ++round) {
    inside_ = 0;
    together_ = kConnections;
    std::vector<std::thread> callers;
    for (int n = 0; n < kConnections; ++n) {
      callers.emplace_back([&, n] { Call(channels[n], Bytes(kMuch, n)); });
    }
    for (std::thread& caller : callers) caller.join();
  }
  EXPECT_EQ(threads_.driving(), 1);
}

TEST_F(OwnSocketsTest, AConnectionThatMovesLittleAgainComesBack) {
  const std::shared_ptr<grpc::Channel> channel = Connect();
  Call(channel, Bytes(kLittle, 1));
  const std::thread::id of_all = last();
  while (last() == of_all) Call(channel, Bytes(kMuch, 2));
  while (last() != of_all) Call(channel, Bytes(kLittle, 3));
}

// There are more of them than other threads, so that this one has some.
TEST_F(OwnSocketsTest, ConnectionsOutliveTheThreadThatHadThem) {
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int n = 0; n < 20; ++n) channels.push_back(Connect());
  grpc::CompletionQueue queue;
  auto sockets = OwnSockets::Create();
  ASSERT_NE(sockets, nullptr);
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    while (!stop && sockets->Drive(queue.cq(), [](void*, bool) {})) {
    }
  });
  for (int n = 0; n < 40; ++n) Call(channels[n % 20], Bytes(kMuch, n));
  stop = true;
  sockets->Wake();
  thread.join();
  sockets.reset();
  for (int n = 0; n < 20; ++n) Call(channels[n], Bytes(kMuch, n));
  queue.Shutdown();
}

TEST_F(OwnSocketsTest, TellsThatTheQueueHasEnded) {
  grpc::CompletionQueue queue;
  queue.Shutdown();
  auto sockets = OwnSockets::Create();
  ASSERT_NE(sockets, nullptr);
  sockets->Wake();
  EXPECT_FALSE(sockets->Drive(queue.cq(), [](void*, bool) {}));
}

TEST_F(OwnSocketsTest, ManyCallsOfAllSizesOverFewConnectionsEndWell) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int n = 0; n < 6; ++n) channels.push_back(Connect());
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 12; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(seed + static_cast<uint32_t>(caller));
      for (int n = 0; n < 40; ++n) {
        const size_t size = size_t{1} << (random() % 22);
        Call(channels[random() % channels.size()], Bytes(size + random() % 3, caller + n));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Completions that no socket causes.
TEST_F(OwnSocketsTest, RunsWhatElseTheQueueHas) {
  grpc::CompletionQueue queue;
  auto sockets = OwnSockets::Create();
  ASSERT_NE(sockets, nullptr);
  grpc::Alarm alarms[3];
  for (grpc::Alarm& alarm : alarms) alarm.Set(&queue, std::chrono::system_clock::now(), &alarm);
  int came = 0;
  while (came < 3) {
    sockets->Wake();
    ASSERT_TRUE(sockets->Drive(queue.cq(), [&](void* alarm, bool ok) {
      void* tag = nullptr;
      EXPECT_TRUE(
          static_cast<grpc::internal::CompletionQueueTag*>(alarm)->FinalizeResult(&tag, &ok));
      EXPECT_TRUE(ok);
      ++came;
    }));
  }
  EXPECT_EQ(came, 3);
  queue.Shutdown();
}

}  // namespace
}  // namespace attnd
