// Calls of modules whose tensors lie in memory that the caller shares with the daemon: the bytes
// that the socket gives, nothing written beside them, and places that are wrong refused by name.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "tests/daemon/daemon_health.h"
#include "tests/daemon/module_caller.h"
#include "tests/daemon/shared_memory_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/unique_name.h"

namespace attnd {
namespace {

constexpr int kSharedRows = 5;
constexpr int64_t kSharedBytes = kSharedRows * kModuleWidth * 4;

ServerOptions SharedModuleOptions() {
  ServerOptions options = TestOptions();
  options.listen = {UniqueName("unix:/tmp/attnd_module_shm_")};
  options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
  return options;
}

class SharedModules : public ::testing::Test {
 protected:
  SharedModules()
      : daemon_(ReferenceDevice(), SharedModuleOptions()),
        caller_(daemon_.NewChannel()),
        region_(1 << 20),
        control_(daemon_.address().substr(5) + ".shm") {
    reply_ = control_.Add(region_);
    EXPECT_TRUE(reply_.error().empty()) << reply_.error();
    v1::RegisterModuleResponse registered;
    EXPECT_TRUE(caller_.Register(SmallRegistration("m"), registered).ok());
    token_ = registered.token();
    v1::PutTensorsResponse put;
    auto bytes = [this](int64_t numbers) { return RandomBytes(random_, numbers); };
    EXPECT_TRUE(caller_.Put(PutMessages(token_, 0, bytes), put).ok());
  }

  std::string Rows() { return RandomBytes(random_, kSharedRows * kModuleWidth); }
  SharedLayout NewLayout() { return SharedLayout(region_, reply_.region(), ++use_); }
  v1::ModuleForwardHeader Header(bool training = false) const {
    return ForwardHeader(token_, 1, kSharedRows, training);
  }
  v1::ModuleBackwardHeader BackwardOf(const v1::ModuleForwardResult& forward) const {
    v1::ModuleBackwardHeader header;
    header.set_token(token_);
    header.set_activations(forward.activations().token());
    header.set_sequence(1);
    header.set_want_dx(true);
    return header;
  }

  Random random_{1};
  Daemon daemon_;
  ModuleCaller caller_;
  TestRegion region_;
  ControlSocket control_;
  v1::SharedMemoryReply reply_;
  std::string token_;
  uint64_t use_ = 0;
};

TEST_F(SharedModules, GivesTheBytesThatTheSocketGivesAndTouchesNoOther) {
  EXPECT_TRUE(reply_.modules());
  std::string x = Rows(), dy = Rows();
  const auto forward = caller_.Forward(Header(true), {{kX, x}});
  ASSERT_TRUE(forward.status.ok()) << forward.status.error_message();
  v1::ModuleBackwardHeader over_socket = BackwardOf(forward.header);
  over_socket.set_no_weight_gradients(true);
  const auto backward = caller_.Backward(over_socket, {{kDy, dy}});
  ASSERT_TRUE(backward.status.ok()) << backward.status.error_message();

  SharedLayout of_forward = NewLayout();
  of_forward.AddInput(v1::TENSOR_NAME_X, &x);
  of_forward.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  v1::ModuleForwardHeader header = Header(true);
  *header.mutable_shared_memory() = of_forward.memory();
  const auto shared = caller_.Forward(header, {});
  ASSERT_TRUE(shared.status.ok()) << shared.status.error_message();
  EXPECT_TRUE(shared.payload.empty());
  EXPECT_EQ(shared.header.payload_size(), 0);
  EXPECT_EQ(of_forward.Read(v1::TENSOR_NAME_Y), forward.payload.at(kY));
  EXPECT_TRUE(of_forward.GapsAreUntouched());

  SharedLayout of_backward = NewLayout();
  of_backward.AddInput(v1::TENSOR_NAME_D_Y, &dy);
  of_backward.AddOutput(v1::TENSOR_NAME_D_X, kSharedBytes);
  v1::ModuleBackwardHeader back = BackwardOf(shared.header);
  *back.mutable_shared_memory() = of_backward.memory();
  const auto gradient = caller_.Backward(back, {});
  ASSERT_TRUE(gradient.status.ok()) << gradient.status.error_message();
  EXPECT_TRUE(gradient.header.added());
  EXPECT_EQ(of_backward.Read(v1::TENSOR_NAME_D_X), backward.payload.at(kDx));
  EXPECT_TRUE(of_backward.GapsAreUntouched());
  while (daemon_.server().staging_used() > 0) std::this_thread::yield();  // gRPC lets go late
}

// Each tensor lies where the header says: the others travel as ever.
TEST_F(SharedModules, TakesSomeTensorsThereAndOthersInChunks) {
  const std::string x = Rows();
  const auto forward = caller_.Forward(Header(), {{kX, x}});
  SharedLayout inputs = NewLayout();
  std::string copy = x;
  inputs.AddInput(v1::TENSOR_NAME_X, &copy);
  v1::ModuleForwardHeader header = Header();
  *header.mutable_shared_memory() = inputs.memory();
  EXPECT_EQ(caller_.Forward(header, {}).payload.at(kY), forward.payload.at(kY));
  SharedLayout outputs = NewLayout();
  outputs.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  *header.mutable_shared_memory() = outputs.memory();
  ASSERT_TRUE(caller_.Forward(header, {{kX, x}}).status.ok());
  EXPECT_EQ(outputs.Read(v1::TENSOR_NAME_Y), forward.payload.at(kY));
}

TEST_F(SharedModules, RefusesPlacesThatAreWrongNamingTheField) {
  struct Wrong {
    v1::TensorName name;
    int64_t size;
    const char* message;
  };
  const Wrong wrongs[] = {
      {v1::TENSOR_NAME_Y, kSharedBytes - 4, "y: expected 160 bytes, got 156 bytes"},
      {v1::TENSOR_NAME_Q, kSharedBytes,
       "shared_memory.tensor: expected inputs of the call and outputs that it wants, got others"},
      {v1::TENSOR_NAME_D_X, kSharedBytes,
       "shared_memory.tensor: expected inputs of the call and outputs that it wants, got others"},
  };
  for (const Wrong& wrong : wrongs) {
    SharedLayout layout = NewLayout();
    layout.AddOutput(wrong.name, wrong.size);
    v1::ModuleForwardHeader header = Header();
    *header.mutable_shared_memory() = layout.memory();
    const auto refused = caller_.Forward(header, {{kX, Rows()}});
    EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(refused.status.error_message(), wrong.message);
  }
  v1::ModuleForwardHeader header = Header();
  SharedLayout twice = NewLayout();
  twice.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  twice.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  *header.mutable_shared_memory() = twice.memory();
  EXPECT_EQ(caller_.Forward(header, {{kX, Rows()}}).status.error_message(),
            "shared_memory.tensor: expected each tensor at most once, got y");

  SharedLayout far = NewLayout();
  far.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  *header.mutable_shared_memory() = far.memory();
  header.mutable_shared_memory()->mutable_tensor(0)->set_offset((1 << 20) - 64);
  EXPECT_EQ(caller_.Forward(header, {{kX, Rows()}}).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  while (daemon_.server().staging_used() > 0) std::this_thread::yield();  // gRPC lets go late
}

// An output that Backward computes but nobody asked for has no place.
TEST_F(SharedModules, RefusesTheForwardsOutputInABackward) {
  v1::ModuleBackwardHeader header;
  header.set_token(token_);
  header.set_sequence(1);
  *header.mutable_forward() = Header(true);
  SharedLayout layout = NewLayout();
  layout.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  *header.mutable_shared_memory() = layout.memory();
  EXPECT_EQ(caller_.Backward(header, {{kX, Rows()}, {kDy, Rows()}}).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  *header.mutable_forward()->mutable_shared_memory() = layout.memory();
  EXPECT_EQ(caller_.Backward(header, {{kX, Rows()}, {kDy, Rows()}}).status.error_message(),
            "forward.shared_memory: expected none, got some");
}

TEST_F(SharedModules, KnowsNoRegionOfAnotherToken) {
  SharedLayout layout = NewLayout();
  layout.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  v1::ModuleForwardHeader header = Header();
  *header.mutable_shared_memory() = layout.memory();
  header.mutable_shared_memory()->set_region(0, std::string(16, 'r'));
  EXPECT_EQ(ReasonOf(caller_.Forward(header, {{kX, Rows()}}).status), "REGION_UNKNOWN");
}

// The next call of a caller that has given up on one cannot meet its tensors.
TEST_F(SharedModules, BeginsNoCallThatHasBeenEnded) {
  SharedLayout layout = NewLayout();
  layout.AddOutput(v1::TENSOR_NAME_Y, kSharedBytes);
  ASSERT_TRUE(control_.AskEndOf(use_));
  v1::SharedMemoryReply ended;
  ASSERT_TRUE(control_.Receive(ended));
  v1::ModuleForwardHeader header = Header();
  *header.mutable_shared_memory() = layout.memory();
  EXPECT_EQ(ReasonOf(caller_.Forward(header, {{kX, Rows()}}).status), "REGION_UNKNOWN");
}

}  // namespace
}  // namespace attnd
