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

// Answers with what it has got, once `gate` calls are inside.
class Echo final : public grpc::CallbackGenericService {
 public:
  explicit Echo(int gate) : gate_(gate) {}

 private:
  class Call final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Call(Echo& echo) : echo_(echo) { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      ++echo_.inside_;
      while (echo_.inside_ < echo_.gate_) std::this_thread::yield();
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
  explicit Server(int gate) : echo(gate) {
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

TEST(EventThreads, LeaveTwoToGrpc) {
  EventThreads threads(8);
  Server server(1);
  for (int n = 0; n < 20; ++n) EXPECT_TRUE(CallEcho(server.Channel()).ok());
  EXPECT_EQ(ThreadsOfGrpc(), 2);
  server.server->Shutdown();
}

// Each holds its thread until all are inside, so that fewer would never end.
TEST(EventThreads, AreAsManyAsAskedForWhileThereIsMuch) {
  EventThreads threads(7);
  EventThreads::Use much(threads, EventThreads::kMuch);
  Server server(7);
  std::shared_ptr<grpc::Channel> channel = server.Channel();
  std::vector<std::thread> callers;
  for (int n = 0; n < 7; ++n) {
    callers.emplace_back([&] { EXPECT_TRUE(CallEcho(channel).ok()); });
  }
  for (std::thread& caller : callers) caller.join();
  server.server->Shutdown();
}

TEST(EventThreads, EndAlone) {
  for (int n = 0; n < 3; ++n) EventThreads threads(5);
}

}  // namespace
}  // namespace attnd
