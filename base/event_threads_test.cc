#include "base/event_threads.h"

#include <dirent.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/generic_echo.h"

namespace attnd {
namespace {

// gRPC's of this process, by the name that it gives them.
int ThreadsOfGrpc() {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  while (const dirent* entry = readdir(folder)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (file >> name && name == "nexting_thread") ++count;
  }
  closedir(folder);
  return count;
}

grpc::Status CallEcho(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ByteBuffer reply;
  return attnd::CallEcho(channel, "hello", reply);
}

void CallTwoAtOnce(const std::shared_ptr<grpc::Channel>& channel) {
  std::thread other([&] { EXPECT_TRUE(CallEcho(channel).ok()); });
  EXPECT_TRUE(CallEcho(channel).ok());
  other.join();
}

// Answers once `gate` calls are inside and after some work.
struct Server {
  explicit Server(int gate, absl::Duration work = absl::ZeroDuration(),
                  const EventThreads* threads = nullptr)
      : echo([this, gate, work, threads](const grpc::ByteBuffer&) {
          if (threads != nullptr) Watch(threads->driving());
          ++inside;
          while (inside < gate) std::this_thread::yield();
          for (absl::Time end = absl::Now() + work; absl::Now() < end;) {
          }
        }) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(&echo);
    server = builder.BuildAndStart();
  }
  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                               grpc::InsecureChannelCredentials());
  }
  void Watch(int driving) {
    int most = most_driving;
    while (driving > most && !most_driving.compare_exchange_weak(most, driving)) {
    }
  }
  std::atomic<int> inside{0};
  std::atomic<int> most_driving{0};  // of `threads`, as a call came
  GenericEcho echo;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

TEST(EventThreads, OneAnswersOneCaller) {
  EventThreads threads(8);
  Server server(1);
  for (int n = 0; n < 20; ++n) EXPECT_TRUE(CallEcho(server.Channel()).ok());
  EXPECT_EQ(ThreadsOfGrpc(), 0);
  EXPECT_EQ(threads.driving(), 1);
  server.server->Shutdown();
}

// Between calls that follow one another at once it looks for the next instead of sleeping, and is
// not busy for that. Where others have its core in between, it may be for a moment.
TEST(EventThreads, OneAnswersCallsInARow) {
  EventThreads threads(8);
  Server server(1);
  const std::shared_ptr<grpc::Channel> channel = server.Channel();
  constexpr absl::Duration kTime = absl::Milliseconds(400);
  absl::Duration by_one;
  const absl::Time start = absl::Now();
  for (absl::Time last = start, now; last < start + kTime; last = now) {
    ASSERT_TRUE(CallEcho(channel).ok());
    now = absl::Now();
    if (threads.driving() == 1) by_one += now - last;
  }
  EXPECT_GT(by_one, kTime / 2);
  server.server->Shutdown();
}

// A callback holds its thread until the other is inside.
TEST(EventThreads, OneJoinsWhenTheOthersAreHeldUp) {
  EventThreads threads(2);
  Server server(2);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  CallTwoAtOnce(channel);
  server.server->Shutdown();
}

TEST(EventThreads, ThreeDriveWhileOneHasNoPause) {
  EventThreads threads(8);
  Server server(1, absl::Milliseconds(2), &threads);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  std::vector<std::thread> callers;
  for (int n = 0; n < 6; ++n) {
    callers.emplace_back([&] {
      while (server.most_driving < 3) EXPECT_TRUE(CallEcho(channel).ok());
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(server.most_driving, 3);
  server.server->Shutdown();
}

TEST(EventThreads, LeaveWhenNoLongerNeeded) {
  const absl::Time start = absl::Now();
  EventThreads threads(2);
  Server server(2, absl::ZeroDuration(), &threads);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  CallTwoAtOnce(channel);
  EXPECT_EQ(server.most_driving, 2);
  const int driving = threads.driving();
  EXPECT_TRUE(driving == 2 || absl::Now() - start > EventThreads::kStay) << driving;
  while (threads.driving() > 1) EXPECT_TRUE(CallEcho(channel).ok());
  EXPECT_TRUE(CallEcho(channel).ok());
  server.server->Shutdown();
}

TEST(EventThreads, OfTwoObjectsAreTheGreaterNumber) {
  EventThreads few(1);
  EventThreads many(2);
  Server server(2, absl::ZeroDuration(), &few);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  CallTwoAtOnce(channel);
  EXPECT_EQ(server.most_driving, 2);
  server.server->Shutdown();
}

TEST(EventThreads, ServeAProcessThatDoesNotAskForThem) {
  {
    Server server(1);
    EXPECT_TRUE(CallEcho(server.Channel()).ok());
    EXPECT_EQ(ThreadsOfGrpc(), 0);
    server.server->Shutdown();
  }
  EventThreads one(1);
  EXPECT_EQ(one.driving(), 1);
}

TEST(EventThreads, EndAlone) {
  for (int n = 0; n < 3; ++n) EventThreads threads(5);
}

}  // namespace
}  // namespace attnd
