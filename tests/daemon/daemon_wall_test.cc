// Every call of every service has this around it, whatever its method: room for what it holds,
// taken before any work and held to the last byte of its reply; a watch over its peer; and places
// that few callers cannot take all.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/attnd/v1/module.pb.h"
#include "tests/daemon/module_caller.h"
#include "tests/daemon/shut_peer.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd {
namespace {

// The status of a call of one empty message.
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(&tag);
  queue.Next(&tag, &ok);
  grpc::Slice nothing("");
  call->WriteLast(grpc::ByteBuffer(&nothing, 1), {}, &tag);
  queue.Next(&tag, &ok);
  grpc::ByteBuffer reply;
  do {
    call->Read(&reply, &tag);
    queue.Next(&tag, &ok);
  } while (ok);
  grpc::Status status;
  call->Finish(&status, &tag);
  queue.Next(&tag, &ok);
  return status;
}

TEST(DaemonWall, StandsAroundEveryMethodOfEveryService) {
  ServerOptions options = TestOptions();
  options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
  options.admission.call_bytes = 0;
  Daemon daemon(ReferenceDevice(), options);
  const std::vector<std::string> methods = AllMethods();
  EXPECT_GE(methods.size(), 21);
  for (const std::string& method : methods) {
    const grpc::Status status = CallEmpty(daemon.NewChannel(), method);
    const google::rpc::ErrorInfo info = ErrorInfoOf(status);
    EXPECT_EQ(info.reason(), "TENANT_QUOTA") << method << ": " << status.error_message();
    EXPECT_EQ(info.metadata().count("limit"), 1) << method;
    if (info.metadata().count("limit") == 0) continue;
    EXPECT_EQ(info.metadata().at("limit"), "call_bytes") << method;
  }
}

// A layout of 2 KB whose table of parameters has 13 MB.
TEST(DaemonWall, CountsWhatALayoutBecomesBeforeItDoes) {
  ServerOptions options = TestOptions();
  options.modules.memory = {int64_t{64} << 20, int64_t{64} << 20};
  options.admission.call_bytes = int64_t{8} << 20;
  Daemon daemon(ReferenceDevice(), options);
  ModuleCaller caller(daemon.NewChannel());
  v1::RegisterModuleRequest request = SmallRegistration("m");
  v1::Block& block = *request.mutable_layout()->mutable_block(0);
  block.clear_op();
  block.clear_parameter();
  for (uint32_t n = 0; n < 64; ++n) {
    v1::Parameter& parameter = *block.add_parameter();
    parameter.set_name(absl::StrCat(n));
    parameter.add_shape(kModuleWidth);
    parameter.add_shape(kModuleWidth);
    v1::Linear& linear = *block.add_op()->mutable_linear();
    linear.set_input(n == 0 ? 0 : n + 1);
    linear.set_weight(n);
  }
  request.mutable_layout()->clear_layer();
  for (int n = 0; n < 512; ++n) {
    request.mutable_layout()->add_layer()->set_prefix(absl::StrCat(n, "."));
  }
  request.set_dry_run(true);
  v1::RegisterModuleResponse response;
  google::rpc::ErrorInfo info = ErrorInfoOf(caller.Register(request, response));
  EXPECT_EQ(info.reason(), "TENANT_QUOTA");
  EXPECT_EQ((*info.mutable_metadata())["limit"], "call_bytes");
  request.mutable_layout()->mutable_layer()->DeleteSubrange(8, 504);
  EXPECT_TRUE(caller.Register(request, response).ok());
}

class Unread : public ::testing::Test {
 protected:
  static ServerOptions Options() {
    ServerOptions options = WithMetrics();
    options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
    return options;
  }
  std::string RegisterOne() {
    v1::RegisterModuleResponse response;
    const grpc::Status status = caller_.Register(SmallRegistration("m"), response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    v1::PutTensorsResponse put;
    const auto bytes = [this](int64_t count) { return RandomBytes(random_, count); };
    EXPECT_TRUE(caller_.Put(PutMessages(response.token(), 0, bytes), put).ok());
    while (daemon_.server().call_bytes() > 0) std::this_thread::yield();
    return response.token();
  }
  // Beyond what a peer may do before it is cut.
  void LetTimePass() {
    clock_.Advance(Options().transport.transfers.idle + absl::Seconds(1));
    while (daemon_.server().call_bytes() > 0) std::this_thread::yield();
  }

  FakeClock clock_{absl::Now()};
  Random random_{1};
  Daemon daemon_{ReferenceDevice(), Options(), clock_};
  ModuleCaller caller_{daemon_.NewChannel()};
};

TEST_F(Unread, RepliesOfEveryKindAreHeldInRoomAndCut) {
  const std::string token = RegisterOne();
  v1::BuildPatternRequest pattern;
  pattern.set_pooled(std::string(4 * 64 * 64, '\0'));
  pattern.set_block(16);
  pattern.mutable_top_k()->set_density(1);
  v1::GetModuleRequest get;
  get.set_token(token);
  v1::GetTensorsRequest tensors;
  tensors.set_token(token);
  struct Case {
    const char* method;
    std::string request;
    int64_t at_least;  // of a reply
  };
  const Case cases[] = {
      {"/attnd.v1.Attention/GetServerInfo", "", 8 << 10},
      {"/attnd.v1.Attention/BuildPattern", pattern.SerializeAsString(), 8 << 10},
      {"/attnd.v1.Modules/ListModules", "", 8 << 10},
      {"/attnd.v1.Modules/GetModule", get.SerializeAsString(), 8 << 10},
      {"/attnd.v1.Modules/GetTensors", tensors.SerializeAsString(), 1 << 20},
  };
  for (const Case& one : cases) {
    auto peer = Shut(daemon_);
    constexpr int kCalls = 4;
    for (uint32_t n = 0; n < kCalls; ++n) Ask(*peer, 2 * n + 1, one.method, one.request);
    while (peer->answers() < kCalls) peer->Read(100);  // the beginnings of the replies
    EXPECT_GE(daemon_.server().call_bytes(), kCalls * one.at_least) << one.method;
    LetTimePass();
    while (peer->resets() < kCalls && !peer->ended()) peer->Read(100);
    EXPECT_EQ(peer->bytes_of(1), 0) << one.method;
  }
  EXPECT_EQ(Counts(daemon_).Of("attnd_calls_cut_total",
                               {{"method", "BuildPattern"}, {"stage", "send"}, {"reason", "idle"}}),
            4);
}

// A reply that nobody reads keeps its call's place: one caller has no more of them.
TEST_F(Unread, RepliesOfModulesKeepTheirPlaces) {
  v1::GetModuleRequest get;
  get.set_token(RegisterOne());
  auto peer = Shut(daemon_);
  constexpr int kPlaces = 32;
  for (uint32_t n = 0; n < kPlaces; ++n) {
    Ask(*peer, 2 * n + 1, "/attnd.v1.Modules/GetModule", get.SerializeAsString());
  }
  while (peer->answers() < kPlaces) peer->Read(100);
  v1::GetModuleResponse response;
  const auto ask = [&] { return caller_.Call(&v1::Modules::Stub::GetModule, get, response); };
  EXPECT_EQ(ErrorInfoOf(ask()).reason(), "TENANT_QUOTA");
  LetTimePass();
  EXPECT_TRUE(ask().ok());
}

TEST_F(Unread, BytesOfRepliesAreBounded) {
  ServerOptions options = Options();
  options.admission.call_bytes = 256 << 10;
  FakeClock clock(absl::Now());
  Daemon daemon(ReferenceDevice(), options, clock);
  auto peer = Shut(daemon);
  constexpr int kCalls = 60;
  for (uint32_t n = 0; n < kCalls; ++n)
    Ask(*peer, 2 * n + 1, "/attnd.v1.Attention/GetServerInfo", "");
  while (peer->answers() < kCalls) peer->Read(100);
  EXPECT_LE(daemon.server().call_bytes(), options.admission.call_bytes / 2);
  EXPECT_GT(daemon.server().call_bytes(), 0);
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  EXPECT_EQ(ErrorInfoOf(daemon.stub().GetServerInfo(&context, {}, &info)).reason(), "TENANT_QUOTA");
  clock.Advance(options.transport.transfers.idle + absl::Seconds(1));
  while (daemon.server().call_bytes() > 0) std::this_thread::yield();
  grpc::ClientContext again;
  EXPECT_TRUE(daemon.stub().GetServerInfo(&again, {}, &info).ok());
}

// Streams without a message: two addresses open as many as they may.
TEST_F(Unread, StreamsWithoutAMessageTakeNoPlace) {
  v1::GetModuleRequest get;
  get.set_token(RegisterOne());
  std::vector<std::unique_ptr<RawHttp2>> peers;
  for (const char* source : {"127.0.0.2", "127.0.0.3"}) {
    auto& peer = peers.emplace_back(Shut(daemon_, source));
    for (uint32_t n = 0; n < 60; ++n) {
      peer->StartCall(2 * n + 1, "/attnd.v1.Modules/PutTensors");
    }
    Settle(*peer);  // all have come
  }
  for (int n = 0; n < 50; ++n) {
    v1::GetModuleResponse response;
    const grpc::Status status = caller_.Call(&v1::Modules::Stub::GetModule, get, response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(peers[0]->answers() + peers[1]->answers(), 0);
}

// One caller fills its share of the memory for tensors, and no more than that.
TEST(DaemonWall, CountsTensorsOfModuleCallsAsTheirCallers) {
  constexpr int64_t kCall = 2 * 16 * kModuleWidth * 4;  // x and y of 16 rows
  ServerOptions options = TestOptions();
  options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
  options.admission.caller_max_bytes = 2 * kCall;
  options.token_file = testing::TempDir() + "/two_callers";
  std::ofstream(options.token_file) << "a 1111111111111111\nb 2222222222222222\n";
  Daemon daemon(ReferenceDevice(), options);
  Random random(1);
  const std::string x = RandomBytes(random, 16 * kModuleWidth);
  ModuleCaller first(daemon.NewChannel(), "1111111111111111");
  ModuleCaller second(daemon.NewChannel(), "2222222222222222");
  std::vector<v1::ModuleForwardHeader> headers;
  for (ModuleCaller* caller : {&first, &second}) {
    v1::RegisterModuleResponse registered;
    v1::PutTensorsResponse put;
    ASSERT_TRUE(caller->Register(SmallRegistration("m"), registered).ok());
    const auto bytes = [&](int64_t count) { return RandomBytes(random, count); };
    ASSERT_TRUE(caller->Put(PutMessages(registered.token(), 0, bytes), put).ok());
    headers.push_back(ForwardHeader(registered.token(), 1, 16));
  }
  v1::ModuleForwardRequest header;
  *header.mutable_header() = headers[0];
  header.mutable_header()->add_payload()->set_tensor(kX);
  header.mutable_header()->mutable_payload(0)->set_bytes(x.size());
  {
    auto context = first.NewContext(), more = first.NewContext();
    const auto stream = first.stub().Forward(context.get());
    const auto another = first.stub().Forward(more.get());
    EXPECT_TRUE(stream->Write(header) && another->Write(header));
    while (daemon.server().staging_used() < 2 * kCall) std::this_thread::yield();
    const grpc::Status refused = first.Forward(headers[0], {{kX, x}}).status;
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(ErrorInfoOf(refused).reason(), "TENANT_QUOTA");
    const auto reply = second.Forward(headers[1], {{kX, x}});
    EXPECT_TRUE(reply.status.ok()) << reply.status.error_message();
    context->TryCancel();
    more->TryCancel();
    EXPECT_FALSE(stream->Finish().ok() || another->Finish().ok());
  }
  grpc::Status status;
  do {
    status = first.Forward(headers[0], {{kX, x}}).status;
  } while (ErrorInfoOf(status).reason() == "TENANT_QUOTA");  // until those have gone
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Two callers whose calls have begun and do not go on.
TEST(DaemonWall, LeavesPlacesForAThirdCaller) {
  ServerOptions options = TestOptions();
  options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
  options.token_file = testing::TempDir() + "/three_callers";
  std::ofstream(options.token_file) << "a 1111111111111111\nb 2222222222222222\nc "
                                       "3333333333333333\n";
  Daemon daemon(ReferenceDevice(), options);
  std::vector<std::unique_ptr<RawHttp2>> peers;
  for (const char* bearer : {"1111111111111111", "2222222222222222"}) {
    ModuleCaller caller(daemon.NewChannel(), bearer);
    v1::RegisterModuleResponse registered;
    ASSERT_TRUE(caller.Register(SmallRegistration("m"), registered).ok());
    v1::PutTensorsRequest put;
    put.mutable_header()->set_token(registered.token());
    auto& peer = peers.emplace_back(Shut(daemon));
    for (uint32_t n = 0; n < 60; ++n) {
      Ask(*peer, 2 * n + 1, "/attnd.v1.Modules/PutTensors", put.SerializeAsString(),
          {{"authorization", absl::StrCat("Bearer ", bearer)}}, false);
    }
    // The first has half of all places, the second half of what is left.
    const int refused = peers.size() == 1 ? 60 - 32 : 60 - 16;
    while (peer->answers() < refused) peer->Read(100);
  }
  ModuleCaller third(daemon.NewChannel(), "3333333333333333");
  v1::RegisterModuleResponse registered;
  for (int n = 0; n < 20; ++n) {
    grpc::Status status;
    do {  // places of its own calls before, of which gRPC tells late that they have ended
      status = third.Register(SmallRegistration("m"), registered);
    } while (ErrorInfoOf(status).reason() == "QUEUE_FULL");
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
}

}  // namespace
}  // namespace attnd
