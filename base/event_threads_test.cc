#include "base/event_threads.h"

#include <dirent.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
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

// Answers with what it has got, once `gate` calls are inside and after some work.
class Echo final : public grpc::CallbackGenericService {
 public:
  Echo(int gate, absl::Duration work) : gate_(gate), work_(work) {}

 private:
  class Call final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Call(Echo& echo) : echo_(echo) { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      ++echo_.inside_;
      while (echo_.inside_ < echo_.gate_) std::this_thread::yield();
      for (absl::Time end = absl::Now() + echo_.work_; absl::Now() < end;) {
      }
      StartWriteAndFinish(&message_, {}, grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    Echo& echo_;
    grpc::ByteBuffer message_;
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Call(*this);
  }
  const int gate_;
  const absl::Duration work_;
  std::atomic<int> inside_{0};
};

grpc::Status CallEcho(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::Slice slice("hello");
  grpc::ByteBuffer request(&slice, 1), reply;
  grpc::CompletionQueue queue;
  grpc::Status status;
  auto call = stub.PrepareUnaryCall(&context, "/test/Echo", request, &queue);
  call->StartCall();
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return status;
}

struct Server {
  explicit Server(int gate, absl::Duration work = absl::ZeroDuration()) : echo(gate, work) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(&echo);
    server = builder.BuildAndStart();
  }
  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                               grpc::InsecureChannelCredentials());
  }
  Echo echo;
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

// A callback holds its thread until the other is inside.
TEST(EventThreads, OneJoinsWhenTheOthersAreHeldUp) {
  EventThreads threads(2);
  Server server(2);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  std::thread other([&] { EXPECT_TRUE(CallEcho(channel).ok()); });
  EXPECT_TRUE(CallEcho(channel).ok());
  other.join();
  server.server->Shutdown();
}

TEST(EventThreads, ThreeDriveWhileOneHasNoPause) {
  EventThreads threads(8);
  Server server(1, absl::Milliseconds(2));
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  std::vector<std::thread> callers;
  for (int n = 0; n < 6; ++n) {
    callers.emplace_back([&] {
      while (threads.driving() < 3) EXPECT_TRUE(CallEcho(channel).ok());
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(threads.driving(), 3);
  server.server->Shutdown();
}

TEST(EventThreads, LeaveWhenNoLongerNeeded) {
  EventThreads threads(2);
  Server server(2);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  std::thread other([&] { EXPECT_TRUE(CallEcho(channel).ok()); });
  EXPECT_TRUE(CallEcho(channel).ok());
  other.join();
  EXPECT_EQ(threads.driving(), 2);  // they stay for a while
  while (threads.driving() > 1) EXPECT_TRUE(CallEcho(channel).ok());
  EXPECT_TRUE(CallEcho(channel).ok());
  server.server->Shutdown();
}

TEST(EventThreads, OfTwoObjectsAreTheGreaterNumber) {
  EventThreads few(1);
  EventThreads many(2);
  Server server(2);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  std::thread other([&] { EXPECT_TRUE(CallEcho(channel).ok()); });
  EXPECT_TRUE(CallEcho(channel).ok());
  other.join();
  EXPECT_EQ(few.driving(), 2);
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
