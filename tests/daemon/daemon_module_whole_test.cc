// ForwardWhole and BackwardWhole against a real server: the streams' results in one message each
// way, and what is refused there.
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "proto/attnd/v1/chunk_framing.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr uint32_t kMostRows = kWholeBytes / (kModuleWidth * 4);

template <class Message, class Header>
Message WholeOf(Header header, const std::vector<Payload>& payloads, size_t chunk_bytes = 50) {
  Message message;
  for (const auto& [field, bytes] : payloads) {
    v1::PayloadSize& size = *header.add_payload();
    size.set_tensor(static_cast<uint32_t>(field));
    size.set_bytes(bytes.size());
    for (size_t at = 0; at < bytes.size(); at += chunk_bytes) {
      v1::PayloadChunk& chunk = *message.add_chunk();
      chunk.set_tensor(static_cast<uint32_t>(field));
      chunk.set_offset(at);
      chunk.set_data(bytes.substr(at, chunk_bytes));
    }
  }
  *message.mutable_header() = std::move(header);
  return message;
}

template <class Message>
std::map<int, std::string> PayloadsOf(const Message& message) {
  std::map<int, std::string> payloads;
  for (const v1::PayloadChunk& chunk : message.chunk()) {
    std::string& all = payloads[static_cast<int>(chunk.tensor())];
    EXPECT_EQ(chunk.offset(), all.size());
    all += chunk.data();
  }
  return payloads;
}

class DaemonWhole : public ::testing::Test {
 protected:
  static ServerOptions Options() {
    ServerOptions options = TestOptions();
    options.modules.memory = {int64_t{256} << 20, int64_t{256} << 20};
    return options;
  }
  DaemonWhole() {
    v1::RegisterModuleRequest request = SmallRegistration("m");
    request.mutable_limits()->set_max_rows(kMostRows + 1);
    request.mutable_limits()->set_kept_rows(2 * kMostRows);
    v1::RegisterModuleResponse response;
    EXPECT_TRUE(caller_.Register(request, response).ok());
    EXPECT_EQ(response.whole_bytes(), kWholeBytes);
    token_ = response.token();
    v1::PutTensorsResponse put;
    EXPECT_TRUE(
        caller_
            .Put(PutMessages(token_, 0, [this](int64_t n) { return RandomBytes(random_, n); }), put)
            .ok());
  }

  std::string Rows(uint32_t rows) { return RandomBytes(random_, int64_t{rows} * kModuleWidth); }
  grpc::Status Forward(const v1::WholeForwardRequest& request, v1::WholeForwardResponse& response) {
    return caller_.Call(&v1::Modules::Stub::ForwardWhole, request, response);
  }
  grpc::Status ForwardBytes(const std::string& bytes) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(bytes);
    auto call = stub.PrepareUnaryCall(&context, "/attnd.v1.Modules/ForwardWhole",
                                      grpc::ByteBuffer(&slice, 1), &queue);
    call->StartCall();
    grpc::ByteBuffer reply;
    grpc::Status status;
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status;
  }

  Daemon daemon_{ReferenceDevice(), Options()};
  std::shared_ptr<grpc::Channel> channel_ = daemon_.NewChannel();
  ModuleCaller caller_{channel_};
  Random random_{1};
  std::string token_;
};

TEST_F(DaemonWhole, GivesWhatTheStreamsGive) {
  for (uint32_t rows : {1u, 5u, kMostRows}) {
    SCOPED_TRACE(rows);
    const std::string x = Rows(rows), dy = Rows(rows);
    const v1::ModuleForwardHeader forward = ForwardHeader(token_, 1, rows, true);
    const auto streamed = caller_.Forward(forward, {{kX, x}});
    ASSERT_TRUE(streamed.status.ok()) << streamed.status.error_message();
    v1::WholeForwardResponse whole;
    const grpc::Status status =
        Forward(WholeOf<v1::WholeForwardRequest>(forward, {{kX, x}}), whole);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(PayloadsOf(whole), streamed.payload);
    EXPECT_EQ(whole.header().sequence(), 1);

    v1::ModuleBackwardHeader backward;
    backward.set_token(token_);
    backward.set_sequence(1);
    backward.set_want_dx(true);
    backward.set_no_weight_gradients(true);
    backward.set_activations(streamed.header.activations().token());
    const auto expected = caller_.Backward(backward, {{kDy, dy}});
    ASSERT_TRUE(expected.status.ok()) << expected.status.error_message();
    backward.set_activations(whole.header().activations().token());
    v1::WholeBackwardResponse found;
    const grpc::Status done =
        caller_.Call(&v1::Modules::Stub::BackwardWhole,
                     WholeOf<v1::WholeBackwardRequest>(backward, {{kDy, dy}}), found);
    ASSERT_TRUE(done.ok()) << done.error_message();
    EXPECT_EQ(PayloadsOf(found), expected.payload);
  }
}

TEST_F(DaemonWhole, RefusesLargePayloadsAndStreamsBeside) {
  const std::string x = Rows(kMostRows + 1);
  const v1::ModuleForwardHeader header = ForwardHeader(token_, 1, kMostRows + 1);
  v1::WholeForwardResponse response;
  const grpc::Status large =
      Forward(WholeOf<v1::WholeForwardRequest>(header, {{kX, x}}, kChunkBytes), response);
  EXPECT_EQ(large.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << large.error_message();
  EXPECT_NE(large.error_message().find("at most 65536 bytes each way"), std::string::npos)
      << large.error_message();
  EXPECT_TRUE(caller_.Forward(header, {{kX, x}}).status.ok());

  v1::ModuleForwardHeader carried = ForwardHeader(token_, 1, 1);
  carried.set_carry("name");
  const grpc::Status beside =
      Forward(WholeOf<v1::WholeForwardRequest>(carried, {{kX, Rows(1)}}), response);
  EXPECT_EQ(beside.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << beside.error_message();
}

TEST_F(DaemonWhole, RefusesWhatIsNoWholeCall) {
  const std::string x = Rows(5);
  const auto request = WholeOf<v1::WholeForwardRequest>(ForwardHeader(token_, 1, 5), {{kX, x}});
  const std::string bytes = request.SerializeAsString();
  v1::WholeForwardRequest no_header = request, fewer = request, other_order = request;
  no_header.clear_header();
  fewer.mutable_chunk()->RemoveLast();
  other_order.mutable_chunk()->SwapElements(0, 1);
  std::vector<std::string> refused = {"",
                                      no_header.SerializeAsString(),
                                      fewer.SerializeAsString(),
                                      other_order.SerializeAsString(),
                                      bytes + bytes,
                                      bytes + '\x08',
                                      bytes + "\x12\x7f",
                                      "\x0a\xff\xff\xff\xff\x0f",
                                      "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"};
  for (size_t cut : {size_t{1}, bytes.size() / 2, bytes.size() - 1}) {
    refused.push_back(bytes.substr(0, cut));
  }
  for (const std::string& wrong : refused) {
    const grpc::Status status = ForwardBytes(wrong);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << wrong.size() << " bytes: " << status.error_message();
  }
  EXPECT_TRUE(ForwardBytes(bytes).ok());
}

}  // namespace
}  // namespace attnd
