// A peer does to every method of every service what it may do to a call: it does not read the
// reply, sends slowly or not to the end, withdraws, sets a deadline, and calls more often than
// there is room. The methods are those of the protos, so that a new one fails here until it has a
// call.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "proto/attnd/v1/problem_codec.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/masked_request.h"
#include "tests/daemon/module_caller.h"
#include "tests/daemon/shut_peer.h"
#include "tests/daemon/streamed_request.h"
#include "tests/fixtures/connected_engine.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

using Messages = std::vector<std::string>;  // of one call, serialized

constexpr char kAttention[] = "/attnd.v1.Attention/", kModules[] = "/attnd.v1.Modules/";

template <class Streamed, class Request>
Messages StreamOf(Request request) {
  const auto payloads = TakePayloads(request);
  Streamed header;
  *header.mutable_header() = std::move(request);
  Messages messages = {header.SerializeAsString()};
  for (const auto& [field, bytes] : payloads) {
    messages.push_back(Chunk<Streamed>(field, 0, bytes).SerializeAsString());
  }
  return messages;
}

template <class Streamed, class Header>
Messages ModuleStreamOf(Header header, const std::vector<Payload>& payloads) {
  for (const auto& [field, bytes] : payloads) {
    header.add_payload()->set_tensor(static_cast<uint32_t>(field));
    header.mutable_payload(header.payload_size() - 1)->set_bytes(bytes.size());
  }
  Streamed first;
  *first.mutable_header() = std::move(header);
  Messages messages = {first.SerializeAsString()};
  for (const auto& [field, bytes] : payloads) {
    messages.push_back(Chunk<Streamed>(field, 0, bytes).SerializeAsString());
  }
  return messages;
}

// A call of each method that succeeds however often it is sent.
class Methods {
 public:
  explicit Methods(Daemon& daemon) : daemon_(daemon), caller_(daemon.NewChannel()) {
    AddAttention();
    AddModules();
  }

  const std::map<std::string, Messages>& calls() const { return calls_; }

 private:
  void Add(const std::string& service, const std::string& method,
           const google::protobuf::Message& request) {
    calls_[service + method] = {request.SerializeAsString()};
  }

  std::string Residual() {
    v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
    request.mutable_options()->set_keep_residual(true);
    request.mutable_options()->set_residual_ttl_ms(3'600'000);
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    EXPECT_TRUE(daemon_.stub().Forward(&context, request, &reply).ok());
    return reply.residual().token();
  }

  void AddAttention() {
    const v1::ForwardRequest forward = MakeForward(SmallProblem(), 1);
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    EXPECT_TRUE(daemon_.stub().Forward(&context, forward, &reply).ok());
    const v1::BackwardRequest backward = MakeBackward(SmallProblem(), 1, reply);
    Add(kAttention, "Forward", forward);
    Add(kAttention, "Backward", backward);
    calls_[absl::StrCat(kAttention, "ForwardStream")] = StreamOf<v1::ForwardStreamRequest>(forward);
    v1::BackwardRequest streamed = backward;
    streamed.set_d_lse_follows(true);
    calls_[absl::StrCat(kAttention, "BackwardStream")] =
        StreamOf<v1::BackwardStreamRequest>(streamed);
    Add(kAttention, "GetServerInfo", v1::GetServerInfoRequest());
    v1::RenewResidualRequest renew;
    renew.set_token(Residual());
    renew.set_ttl_ms(3'600'000);
    Add(kAttention, "RenewResidual", renew);
    v1::ReleaseResidualRequest release;
    release.set_token(Residual());
    Add(kAttention, "ReleaseResidual", release);
    v1::CompileMaskRequest mask;
    *mask.mutable_problem() = EncodeProblem(WithMask(SmallProblem(), "window(3,0)"));
    Add(kAttention, "CompileMask", mask);
    v1::BuildPatternRequest pattern;
    pattern.set_pooled(std::string(4 * 64 * 64, '\0'));
    pattern.set_block(16);
    pattern.mutable_top_k()->set_density(1);
    Add(kAttention, "BuildPattern", pattern);
    Add(kAttention, "ReleaseCapture", v1::ReleaseCaptureRequest());
  }

  std::string TokenOf(const std::string& name) {
    v1::RegisterModuleResponse registered;
    const grpc::Status status = caller_.Register(SmallRegistration(name), registered);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return registered.token();
  }
  std::vector<v1::PutTensorsRequest> PutOf(const std::string& token) {
    return PutMessages(token, 0, [this](int64_t count) { return RandomBytes(random_, count); });
  }
  // With weights: its sequence is 1.
  std::string ReadyTokenOf(const std::string& name) {
    const std::string token = TokenOf(name);
    v1::PutTensorsResponse put;
    EXPECT_TRUE(caller_.Put(PutOf(token), put).ok());
    return token;
  }

  void AddModules() {
    const std::string token = ReadyTokenOf("m");
    Add(kModules, "Register", SmallRegistration("m"));
    v1::GetModuleRequest get;
    get.set_token(token);
    Add(kModules, "GetModule", get);
    Add(kModules, "ListModules", v1::ListModulesRequest());
    v1::RenewModuleRequest renew;
    renew.set_token(token);
    Add(kModules, "Renew", renew);
    v1::ReleaseModuleRequest release;
    release.set_token(TokenOf("released"));
    Add(kModules, "Release", release);
    const std::string x = RandomBytes(random_, 4 * kModuleWidth);
    calls_[absl::StrCat(kModules, "Forward")] =
        ModuleStreamOf<v1::ModuleForwardRequest>(ForwardHeader(token, 1, 4), {{kX, x}});
    v1::ModuleBackwardHeader backward;
    backward.set_token(token);
    backward.set_sequence(1);
    backward.set_no_weight_gradients(true);
    backward.set_want_dx(true);
    *backward.mutable_forward() = ForwardHeader(token, 1, 4, true);
    backward.mutable_forward()->clear_sequence();
    calls_[absl::StrCat(kModules, "Backward")] =
        ModuleStreamOf<v1::ModuleBackwardRequest>(backward, {{kX, x}, {kDy, x}});
    for (const char* method : {"Forward", "Backward"}) {
      const Messages& streamed = calls_.at(absl::StrCat(kModules, method));
      calls_[absl::StrCat(kModules, method, "Whole")] = {absl::StrJoin(streamed, "")};
    }
    v1::GradientStatsRequest stats;
    stats.set_token(token);
    stats.set_sequence(1);
    Add(kModules, "GradientStats", stats);
    v1::SumGradientsRequest sum;  // the first adds up, the others are told so
    sum.set_token(ReadyTokenOf("summed"));
    sum.set_sequence(1);
    sum.set_replicas(2);
    sum.set_group(std::string(128, 'g'));
    Add(kModules, "SumGradients", sum);
    v1::StepRequest step;  // the first counts, the others are told what came of it
    step.set_token(ReadyTokenOf("stepped"));
    step.set_sequence(1);
    step.set_discard(true);
    Add(kModules, "Step", step);
    for (const v1::PutTensorsRequest& message : PutOf(TokenOf("put"))) {
      calls_[absl::StrCat(kModules, "PutTensors")].push_back(message.SerializeAsString());
    }
    v1::GetTensorsRequest tensors;
    tensors.set_token(token);
    Add(kModules, "GetTensors", tensors);
    std::vector<v1::ModuleCarryRequest> carry(2);  // no call of this name comes
    carry[0].mutable_header()->set_token(token);
    carry[0].mutable_header()->set_carry("none");
    carry[1].mutable_chunk()->set_tensor(kX);
    carry[1].mutable_chunk()->set_data("x");
    for (const v1::ModuleCarryRequest& message : carry) {
      calls_[absl::StrCat(kModules, "Carry")].push_back(message.SerializeAsString());
    }
  }

  Daemon& daemon_;
  ModuleCaller caller_;
  Random random_{1};
  std::map<std::string, Messages> calls_;
};

void Send(RawHttp2& peer, uint32_t stream, const std::string& method, const Messages& messages,
          const RawHttp2::Headers& headers = {}) {
  peer.StartCall(stream, method, headers);
  for (const std::string& message : messages) SendAll(peer, stream, Prefixed(message));
  HalfClose(peer, stream);
}

grpc::Status CallGeneric(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                         const Messages& messages) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(&tag);
  queue.Next(&tag, &ok);
  for (size_t n = 0; n < messages.size() && ok; ++n) {
    const grpc::Slice message(messages[n]);
    grpc::WriteOptions options;
    if (n + 1 == messages.size()) options.set_last_message();
    call->Write(grpc::ByteBuffer(&message, 1), options, &tag);
    queue.Next(&tag, &ok);
  }
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

class EveryMethod : public ::testing::Test {
 protected:
  static constexpr int64_t kCallBytesOfAll = int64_t{24} << 20, kModuleBytes = int64_t{8} << 20;

  static ServerOptions Options() {
    ServerOptions options = TestOptions();
    options.admission.memory_bytes = options.admission.caller_max_bytes = int64_t{8} << 20;
    options.admission.call_bytes = kCallBytesOfAll;
    options.modules.memory = {kModuleBytes, kModuleBytes};
    // The limit counts on a clock that tests move; the watch looks each quarter of it by the
    // machine's.
    options.transport.transfers.idle = absl::Milliseconds(100);
    return options;
  }
  EveryMethod() : methods_(daemon_) { AwaitNothing(); }

  bool HoldsNothing() {
    return daemon_.server().call_bytes() == 0 && daemon_.server().use().bytes == 0;
  }
  void AwaitNothing() {
    while (!HoldsNothing()) std::this_thread::yield();
  }
  void LetTimePass() { clock_.Advance(Options().transport.transfers.idle * 2); }
  // With the daemon's clock, and those of tests that let time pass.
  FakeClock clock_{absl::Now()};
  ConnectedScript script_;
  Daemon daemon_{ConnectedDevice(script_), Options(), clock_};
  Methods methods_;
};

TEST_F(EveryMethod, HasACallHereThatSucceedsAgainAndAgain) {
  const std::vector<std::string> methods = AllMethods();
  EXPECT_EQ(methods.size(), methods_.calls().size());
  const auto channel = daemon_.NewChannel();
  for (const std::string& method : methods) {
    const auto call = methods_.calls().find(method);
    ASSERT_NE(call, methods_.calls().end()) << method;
    if (absl::EndsWith(method, "/Carry")) continue;  // succeeds beside another: DaemonCarry
    for (int n = 0; n < 3; ++n) {
      const grpc::Status status = CallGeneric(channel, method, call->second);
      EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
    }
  }
}

// Three connections ask for more replies than there is room for, and read none. A second flood of
// all methods takes no memory that the first has not taken.
TEST_F(EveryMethod, HoldsUnreadRepliesWithinItsBudgetsAndIsCut) {
  constexpr int kConnections = 3, kCalls = 60;
  constexpr int64_t kBudgets = (int64_t{8} << 20) + kCallBytesOfAll + kModuleBytes;
  const int64_t before = ResidentBytes();
  const auto flood = [&](const std::string& method, const Messages& messages) {
    if (absl::EndsWith(method, "/Carry")) return;  // has no reply without a call
    SCOPED_TRACE(method);
    std::vector<std::unique_ptr<RawHttp2>> peers;
    for (int n = 0; n < kConnections; ++n) {
      peers.push_back(Shut(daemon_));
      for (uint32_t call = 0; call < kCalls; ++call) {
        Send(*peers.back(), 2 * call + 1, method, messages);
      }
    }
    for (auto& peer : peers) {
      while (peer->answers() < kCalls) peer->Read(100);  // the beginnings, or refusals
    }
    EXPECT_GE(daemon_.server().call_bytes(), 8 * (int64_t{8} << 10));
    EXPECT_LE(daemon_.server().call_bytes(), kCallBytesOfAll / 2);  // it is one caller
    EXPECT_LE(daemon_.server().use().bytes, int64_t{8} << 20);
    EXPECT_LT(ResidentBytes() - before, kBudgets + 64 * kMiB);
    LetTimePass();
    AwaitNothing();
    for (auto& peer : peers) {
      for (uint32_t call = 0; call < kCalls; ++call) EXPECT_EQ(peer->bytes_of(2 * call + 1), 0);
    }
  };
  for (const auto& [method, messages] : methods_.calls()) flood(method, messages);
  const int64_t after_first = ResidentBytes();
  for (const auto& [method, messages] : methods_.calls()) flood(method, messages);
  EXPECT_LT(ResidentBytes() - after_first, 16 * kMiB);
  ExpectHealthy(daemon_);
}

// Nothing is held for a message that is not whole; one that is cut off is no request.
TEST_F(EveryMethod, HoldsNothingForMessagesThatAreNotWhole) {
  for (const auto& [method, messages] : methods_.calls()) {
    SCOPED_TRACE(method);
    constexpr uint32_t kCalls = 20;
    RawHttp2 peer(daemon_.address());
    peer.Greet();
    const std::string message = Prefixed(messages.front() + std::string("\x8a\x3e\x01x", 4));
    for (uint32_t call = 0; call < kCalls; ++call) {
      peer.StartCall(2 * call + 1, method);
      SendAll(peer, 2 * call + 1, absl::string_view(message).substr(0, message.size() - 2));
    }
    Settle(peer);
    EXPECT_TRUE(HoldsNothing());
    ExpectHealthy(daemon_);
    for (uint32_t call = 0; call < kCalls; ++call) HalfClose(peer, 2 * call + 1);
    for (uint32_t call = 0; call < kCalls; ++call) {
      while (!peer.is_over(2 * call + 1)) peer.Read(100);
      EXPECT_EQ(peer.bytes_of(2 * call + 1), 0);
    }
    AwaitNothing();
  }
}

// Streams that begin and do not go on are cut.
TEST_F(EveryMethod, IsCutWhenItsMessagesStop) {
  for (const auto& [method, messages] : methods_.calls()) {
    if (messages.size() == 1) continue;
    SCOPED_TRACE(method);
    RawHttp2 peer(daemon_.address());
    peer.Greet();
    peer.StartCall(1, method);
    SendAll(peer, 1, Prefixed(messages.front()));
    while (daemon_.server().call_bytes() == 0) std::this_thread::yield();
    EXPECT_FALSE(peer.is_over(1));
    LetTimePass();
    while (!peer.is_over(1)) peer.Read(100);
    AwaitNothing();
  }
}

TEST_F(EveryMethod, HoldsNothingOnceItIsWithdrawn) {
  for (const auto& [method, messages] : methods_.calls()) {
    SCOPED_TRACE(method);
    auto peer = Shut(daemon_);
    for (uint32_t call = 0; call < 200; ++call) {
      Send(*peer, 2 * call + 1, method, messages);
      peer->Send(RawHttp2::kResetStream, 0, 2 * call + 1, std::string("\0\0\0\x08", 4));
      peer->ReadWhatIsThere();
    }
    Settle(*peer);
    AwaitNothing();
    EXPECT_FALSE(peer->ended());
  }
  ExpectHealthy(daemon_);
}

// By their own deadline alone: no time passes for the watch.
TEST_F(EveryMethod, EndsAtItsDeadlineThoughNobodyReads) {
  std::vector<std::unique_ptr<RawHttp2>> peers;
  constexpr uint32_t kCalls = 4;
  for (const auto& [method, messages] : methods_.calls()) {
    peers.push_back(Shut(daemon_));
    for (uint32_t call = 0; call < kCalls; ++call) {
      Send(*peers.back(), 2 * call + 1, method, messages, {{"grpc-timeout", "300m"}});
    }
  }
  for (auto& peer : peers) {
    for (uint32_t call = 0; call < kCalls; ++call) {
      while (!peer->is_over(2 * call + 1)) peer->Read(100);
    }
  }
  AwaitNothing();
  ExpectHealthy(daemon_);
}

}  // namespace
}  // namespace attnd
