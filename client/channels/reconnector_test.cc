#include "client/channels/reconnector.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

std::unique_ptr<grpc::Server> Serve(grpc::CallbackGenericService& service, int& port) {
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(),
                           &port);
  return builder.BuildAndStart();
}

// Without taking part in what moves the channel.
bool IsReadyWithin(grpc::Channel& channel, absl::Duration time) {
  absl::Notification never;
  for (absl::Time until = absl::Now() + time; absl::Now() < until;) {
    if (channel.GetState(false) == GRPC_CHANNEL_READY) return true;
    never.WaitForNotificationWithTimeout(absl::Milliseconds(5));
  }
  return false;
}

class ReconnectorTest : public testing::Test {
 protected:
  ReconnectorTest() {
    grpc::CallbackGenericService service;
    auto first = Serve(service, port_);
    first->Shutdown();  // the port is free again, and known
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 300);
    channel_ = grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port_),
                                         grpc::InsecureChannelCredentials(), arguments);
  }

  grpc::CallbackGenericService service_;
  int port_ = 0;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ReconnectorTest, ConnectsAChannelWhoseServerComesBackWhileNobodyCalls) {
  Reconnector reconnector;
  reconnector.Drive(channel_);
  reconnector.Drive(channel_);
  EXPECT_FALSE(IsReadyWithin(*channel_, absl::Milliseconds(300)));
  auto server = Serve(service_, port_);
  ASSERT_NE(server, nullptr);
  EXPECT_TRUE(IsReadyWithin(*channel_, absl::Seconds(20)));
  reconnector.Drive(channel_);  // nothing to do
}

TEST_F(ReconnectorTest, StopsWhileAServerIsAway) {
  Reconnector reconnector;
  reconnector.Drive(channel_);
}

TEST_F(ReconnectorTest, NeedsNoThreadWhenNothingIsLost) { Reconnector reconnector; }

}  // namespace
}  // namespace attnd
