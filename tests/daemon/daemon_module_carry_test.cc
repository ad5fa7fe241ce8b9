// Carry against a real server, with generated stubs: chunks of one call over several streams, and
// what becomes of it where one of them brings other chunks, too few, or goes.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr uint32_t kCarriedRows = 2 * (kChunkBytes / (kModuleWidth * 4)) + 3;  // three chunks

// One stream of a call: its own or one of Carry.
template <class Request, class Response>
class OneStream {
 public:
  using Opened = std::unique_ptr<grpc::ClientReaderWriter<Request, Response>>;

  OneStream(ModuleCaller& caller, const std::function<Opened(grpc::ClientContext*)>& open)
      : context_(caller.NewContext()), stream_(open(context_.get())) {}

  template <class Header>
  void Begin(const Header& header) {
    Request request;
    *request.mutable_header() = header;
    stream_->Write(request);
  }
  void Send(int field, uint64_t offset, const std::string& data) {
    Request request;
    request.mutable_chunk()->set_tensor(static_cast<uint32_t>(field));
    request.mutable_chunk()->set_offset(offset);
    request.mutable_chunk()->set_data(data);
    stream_->Write(request);
  }
  // The server has sent the header of its reply.
  bool IsAdmitted() {
    Response response;
    return stream_->Read(&response) && response.has_header();
  }
  void HalfClose() { stream_->WritesDone(); }
  void Cancel() { context_->TryCancel(); }
  // Chunks of the reply, by their offset.
  grpc::Status Finish(std::map<uint64_t, std::string>* chunks = nullptr) {
    Response response;
    while (stream_->Read(&response)) {
      if (response.has_chunk() && chunks != nullptr) {
        EXPECT_TRUE(chunks->emplace(response.chunk().offset(), response.chunk().data()).second);
      }
    }
    return stream_->Finish();
  }

 private:
  const std::unique_ptr<grpc::ClientContext> context_;
  const Opened stream_;
};
using ForwardStream = OneStream<v1::ModuleForwardRequest, v1::ModuleForwardResponse>;
using CarryStream = OneStream<v1::ModuleCarryRequest, v1::ModuleCarryResponse>;

class DaemonCarry : public ::testing::Test {
 protected:
  static ServerOptions Options() {
    ServerOptions options = TestOptions();
    options.modules.memory = {int64_t{256} << 20, int64_t{256} << 20};
    return options;
  }
  DaemonCarry() {
    v1::RegisterModuleRequest request = SmallRegistration("m");
    request.mutable_limits()->set_max_rows(kCarriedRows);
    request.mutable_limits()->set_kept_rows(kCarriedRows);
    v1::RegisterModuleResponse response;
    EXPECT_TRUE(caller_.Register(request, response).ok());
    EXPECT_GT(response.carry_streams(), 0);
    token_ = response.token();
    v1::PutTensorsResponse put;
    EXPECT_TRUE(
        caller_
            .Put(PutMessages(token_, 0, [this](int64_t n) { return RandomBytes(random_, n); }), put)
            .ok());
    x_ = RandomBytes(random_, int64_t{kCarriedRows} * kModuleWidth);
    for (size_t at = 0; at < x_.size(); at += kChunkBytes) {
      chunks_.push_back(x_.substr(at, kChunkBytes));
    }
  }

  v1::ModuleForwardHeader Header(const std::string& carry) {
    v1::ModuleForwardHeader header = ForwardHeader(token_, 1, kCarriedRows);
    header.add_payload()->set_tensor(kX);
    header.mutable_payload(0)->set_bytes(x_.size());
    header.set_carry(carry);
    return header;
  }
  std::unique_ptr<ForwardStream> NewForward(const std::string& carry) {
    auto stream = std::make_unique<ForwardStream>(
        caller_, [this](grpc::ClientContext* context) { return caller_.stub().Forward(context); });
    stream->Begin(Header(carry));
    return stream;
  }
  std::unique_ptr<CarryStream> NewCarry(const std::string& carry, const std::string& token) {
    auto stream = std::make_unique<CarryStream>(
        caller_, [this](grpc::ClientContext* context) { return caller_.stub().Carry(context); });
    v1::ModuleCarryHeader header;
    header.set_token(token);
    header.set_carry(carry);
    stream->Begin(header);
    return stream;
  }
  std::unique_ptr<CarryStream> NewCarry(const std::string& carry) {
    return NewCarry(carry, token_);
  }
  void Send(auto& stream, size_t n) { stream.Send(kX, n * kChunkBytes, chunks_[n]); }

  Random random_{1};
  Daemon daemon_{ReferenceDevice(), Options()};
  ModuleCaller caller_{daemon_.NewChannel()};
  std::string token_, x_;
  std::vector<std::string> chunks_;
};

TEST_F(DaemonCarry, BringsAndFetchesTheChunksOfACall) {
  ModuleCaller plain(daemon_.NewChannel());
  plain.SendChunksOf(kChunkBytes);
  const auto expected = plain.Forward(ForwardHeader(token_, 1, kCarriedRows), {{kX, x_}});
  ASSERT_TRUE(expected.status.ok()) << expected.status.error_message();

  auto early = NewCarry("a");
  auto call = NewForward("a");
  auto late = NewCarry("a");
  ASSERT_TRUE(early->IsAdmitted());
  ASSERT_TRUE(late->IsAdmitted());
  Send(*late, 2);
  Send(*early, 0);
  Send(*call, 1);
  call->HalfClose();
  early->HalfClose();
  late->HalfClose();
  std::map<uint64_t, std::string> chunks, of_early, of_late;
  EXPECT_TRUE(call->Finish(&chunks).ok());
  EXPECT_TRUE(early->Finish(&of_early).ok());
  EXPECT_TRUE(late->Finish(&of_late).ok());
  chunks.merge(of_early);
  chunks.merge(of_late);
  EXPECT_TRUE(of_early.empty() && of_late.empty());  // each came once
  std::string y;
  for (const auto& [offset, data] : chunks) {
    EXPECT_EQ(offset, y.size());
    y += data;
  }
  EXPECT_TRUE(y == expected.payload.at(kY));
}

TEST_F(DaemonCarry, IsNotNeeded) {
  auto call = NewForward("a");
  for (size_t n : {2, 0, 1}) Send(*call, n);
  call->HalfClose();
  std::map<uint64_t, std::string> chunks;
  EXPECT_TRUE(call->Finish(&chunks).ok());
  EXPECT_EQ(chunks.size(), 3u);
  // Its carriage has gone with it, so that this one waits until it is given up.
  auto late = NewCarry("a");
  late->Cancel();
  EXPECT_FALSE(late->Finish().ok());
}

TEST_F(DaemonCarry, ChunksOfOtherSizesPlacesOrTimesAreRefused) {
  const std::vector<std::function<void(ForwardStream&)>> wrong = {
      [&](ForwardStream& call) { call.Send(kX, 0, chunks_[0].substr(1)); },
      [&](ForwardStream& call) { call.Send(kX, 1, chunks_[0]); },
      [&](ForwardStream& call) { call.Send(kX, 3 * kChunkBytes, "a"); },
      [&](ForwardStream& call) { call.Send(kX, 2 * kChunkBytes, chunks_[2] + "a"); },
      [&](ForwardStream& call) { call.Send(kX, UINT64_MAX - kChunkBytes + 1, chunks_[0]); },
      [&](ForwardStream& call) { call.Send(kY, 0, chunks_[0]); },
      [&](ForwardStream& call) {
        Send(call, 0);
        Send(call, 0);
      },
      [&](ForwardStream& call) { Send(call, 0); },  // and no more
  };
  for (size_t n = 0; n < wrong.size(); ++n) {
    auto call = NewForward(absl::StrCat("a", n));
    wrong[n](*call);
    call->HalfClose();
    const grpc::Status status = call->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << n;
    EXPECT_EQ(ErrorInfoOf(status).reason(), "CHUNK_ORDER") << n << status.error_message();
  }
}

TEST_F(DaemonCarry, ACallFailsWithAStreamThatMayHaveHadChunks) {
  auto call = NewForward("a");
  auto carry = NewCarry("a");
  ASSERT_TRUE(carry->IsAdmitted());
  Send(*call, 0);
  call->HalfClose();
  carry->Cancel();
  EXPECT_FALSE(carry->Finish().ok());
  EXPECT_EQ(call->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DaemonCarry, EndsWithACallThatFails) {
  auto call = NewForward("a");
  auto carry = NewCarry("a");
  ASSERT_TRUE(carry->IsAdmitted());
  call->Send(kX, 1, chunks_[0]);
  call->HalfClose();
  EXPECT_EQ(call->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  Send(*carry, 0);
  carry->HalfClose();
  EXPECT_EQ(carry->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DaemonCarry, NamesAreOfOneCallAndAtMost64Bytes) {
  auto first = NewForward("a");
  auto carry = NewCarry("a");
  ASSERT_TRUE(carry->IsAdmitted());
  auto second = NewForward("a");
  second->HalfClose();
  EXPECT_EQ(second->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(NewForward(std::string(65, 'a'))->Finish().error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  for (const std::string& name : {std::string(), std::string(65, 'a')}) {
    EXPECT_EQ(NewCarry(name)->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_EQ(NewCarry("a", "no token")->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  carry->HalfClose();
  for (size_t n : {0, 1, 2}) Send(*first, n);
  first->HalfClose();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(carry->Finish().ok());
}

}  // namespace
}  // namespace attnd
