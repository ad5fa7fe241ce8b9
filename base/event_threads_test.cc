#include "base/event_threads.h"

#include <dirent.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>

namespace attnd {
namespace {

// Of this process, by the name that gRPC gives them.
int RunningEventThreads() {
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

int EventThreadsOfAServer(int wanted) {
  grpc::CallbackGenericService service;
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  std::unique_ptr<grpc::Server> server;
  {
    EventThreads threads(wanted);
    server = builder.BuildAndStart();
  }
  // They name themselves as they start.
  for (int n = 0; n < 1000000 && RunningEventThreads() < wanted; ++n) {
  }
  int running = RunningEventThreads();
  server->Shutdown();
  return running;
}

TEST(EventThreads, AreAsManyAsAskedFor) {
  EXPECT_EQ(EventThreadsOfAServer(3), 3);
  EXPECT_EQ(EventThreadsOfAServer(11), 11);  // on no machine both by chance
}

}  // namespace
}  // namespace attnd
