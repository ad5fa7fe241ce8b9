// The C++ client's module calls on the daemon's host: tensors in shared memory give the bytes that
// the socket gives, also once the daemon has been started anew and knows neither module nor memory.
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "client/modules/module_client.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd {
namespace {

constexpr uint32_t kManyRows = 4096;  // 128 KiB a tensor

ServerOptions ModulesOnThisHost() {
  static int count = 0;
  ServerOptions options = WithMetrics();
  options.listen = {absl::StrCat("unix:/tmp/attnd_client_module_", getpid(), "_", ++count)};
  options.modules.memory = {int64_t{64} << 20, int64_t{64} << 20};
  return options;
}

std::vector<std::byte> BytesOf(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

SentPut SmallWeights() {
  Random random(3);
  SentPut put;
  for (const char* layer : {"layer0.", "layer1."}) {
    for (const char* name : {"weight", "bias"}) {
      SentTensor tensor;
      tensor.header.set_kind(v1::TENSOR_KIND_WEIGHT);
      tensor.header.set_name(absl::StrCat(layer, name));
      tensor.header.set_element(v1::ELEMENT_FLOAT32);
      const bool is_matrix = std::string(name) == "weight";
      tensor.header.add_shape(kModuleWidth);
      if (is_matrix) tensor.header.add_shape(kModuleWidth);
      tensor.bytes = std::make_shared<const std::string>(
          RandomBytes(random, kModuleWidth * (is_matrix ? kModuleWidth : 1)));
      put.tensors.push_back(std::move(tensor));
    }
  }
  put.commit.set_complete(true);
  return put;
}

// A module on a daemon, and the same micro-batch each time.
class TrainedModule {
 public:
  TrainedModule(const std::string& address, int64_t shared_bytes) {
    auto client = AttentionClient::Connect(
        {.addresses = {address}, .wait_for_ready = true, .shared_memory_bytes = shared_bytes});
    CHECK(client.ok()) << client.status();
    client_ = *std::move(client);
    v1::RegisterModuleRequest request = SmallRegistration(absl::StrCat("m", shared_bytes));
    request.mutable_limits()->set_max_rows(kManyRows);
    request.mutable_limits()->set_kept_rows(kManyRows);
    auto made = ModuleClient(*client_).Register(request);
    CHECK(made.ok()) << made.status();
    module_ = std::move(made->module);
    const absl::Status put = module_->Put(SmallWeights(), {});
    CHECK(put.ok()) << put;
  }

  // y and dx of one micro-batch.
  std::pair<std::vector<std::byte>, std::vector<std::byte>> Compute() {
    Random random(5);
    const std::vector<std::byte> x = BytesOf(RandomBytes(random, kManyRows * kModuleWidth));
    const std::vector<std::byte> dy = BytesOf(RandomBytes(random, kManyRows * kModuleWidth));
    std::vector<std::byte> y(x.size()), dx(x.size());
    v1::ModuleForwardHeader header;
    header.mutable_rows()->set_batch(1);
    header.mutable_rows()->set_length(kManyRows);
    header.set_training(true);
    std::unique_ptr<RemoteModule::Activations> kept;
    absl::Status done = module_->Forward(header, {.x = x}, absl::MakeSpan(y), {}, &kept);
    EXPECT_TRUE(done.ok()) << done;
    done = module_->Backward(*kept, dy, false, {.dx = absl::MakeSpan(dx)}, {});
    EXPECT_TRUE(done.ok()) << done;
    return {std::move(y), std::move(dx)};
  }
  void Step() {
    v1::StepRequest request;
    request.add_group()->set_learning_rate(0.1);
    const auto done = module_->Step(std::move(request), {});
    EXPECT_TRUE(done.ok()) << done.status();
  }

 private:
  std::unique_ptr<AttentionClient> client_;
  std::unique_ptr<RemoteModule> module_;
};

TEST(ClientModuleShared, GivesTheBytesThatTheSocketGives) {
  Daemon daemon(ReferenceDevice(), ModulesOnThisHost());
  const Counts counts(daemon);
  TrainedModule over_socket(daemon.address(), 0);
  const auto expected = over_socket.Compute();
  EXPECT_EQ(counts.Of("attnd_received_bytes_total", {{"transport", "memfd"}}), 0);
  TrainedModule shared(daemon.address(), int64_t{256} << 20);
  EXPECT_TRUE(shared.Compute() == expected);
  EXPECT_EQ(counts.Of("attnd_received_bytes_total", {{"transport", "memfd"}}),
            2 * kManyRows * kModuleWidth * 4);
  EXPECT_EQ(counts.Of("attnd_sent_bytes_total", {{"transport", "memfd"}}),
            2 * kManyRows * kModuleWidth * 4);
}

// Less memory than one tensor takes: they travel.
TEST(ClientModuleShared, SendsTensorsWhereThereIsNoRoom) {
  Daemon daemon(ReferenceDevice(), ModulesOnThisHost());
  TrainedModule over_socket(daemon.address(), 0);
  TrainedModule shared(daemon.address(), 1 << 16);
  EXPECT_TRUE(shared.Compute() == over_socket.Compute());
}

TEST(ClientModuleShared, GoesOnWithADaemonThatWasStartedAnew) {
  const ServerOptions options = ModulesOnThisHost();
  auto daemon = std::make_unique<Daemon>(ReferenceDevice(), options);
  TrainedModule over_socket(options.listen[0], 0);
  over_socket.Compute();
  over_socket.Step();
  const auto expected = over_socket.Compute();

  TrainedModule shared(options.listen[0], int64_t{256} << 20);
  shared.Compute();
  daemon.reset();
  daemon = std::make_unique<Daemon>(ReferenceDevice(), options);
  shared.Step();
  EXPECT_TRUE(shared.Compute() == expected);
}

}  // namespace
}  // namespace attnd
