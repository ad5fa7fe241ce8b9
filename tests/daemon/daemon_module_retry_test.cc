// Retries of training calls: whatever is sent twice, late or out of order, the weights are bitwise
// those of the quiet run. An engine that adds retried micro-batches again shows that the test sees
// it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/forgetful_engine.h"

namespace attnd {
namespace {

constexpr int kSteps = 12, kMicroBatches = 4, kRows = 4;

Device Cpu() { return CpuDeviceOf({.threads = 2}); }

Device ForgetfulDevice() {
  return {MakeCpuBackend({.threads = 2}),
          [](const HoldDeviceMemory&) { return std::make_unique<ForgetfulEngine>(); }};
}

// One run of kSteps steps on a server of its own; the weights and moments at the end.
class Training {
 public:
  explicit Training(Device device, const std::string& state_dir = "")
      : daemon_(std::move(device), OptionsOf(state_dir)), caller_(daemon_.NewChannel()) {
    v1::RegisterModuleRequest request = SmallRegistration("m", 0.25f);
    if (!state_dir.empty()) request.set_durability(v1::DURABILITY_HOST);
    v1::RegisterModuleResponse response;
    const grpc::Status status = caller_.Register(request, response);
    CHECK(status.ok()) << status.error_message();
    token_ = response.token();
    first_ = std::max<uint64_t>(response.status().sequence(), 1);
    if (response.status().sequence() > 0) return;
    Random random(3);
    v1::PutTensorsResponse put;
    const auto bytes = [&](int64_t count) { return RandomBytes(random, count); };
    CHECK(caller_.Put(PutMessages(token_, 0, bytes), put).ok());
  }

  // From the sequence where the module stands.
  std::map<std::string, std::string> Quiet() {
    for (uint64_t sequence = first_; sequence <= kSteps; ++sequence) {
      for (uint32_t n = 0; n < kMicroBatches; ++n) {
        CHECK(Backward(sequence, n, ForwardModule(sequence, n)).status.ok());
      }
      CHECK(Step(sequence).applied());
    }
    return Tensors();
  }

  // Dies at step `at`: after one of its micro-batches, or after the step itself; saved is all
  // before.
  void DieAt(uint64_t at, bool after_step) {
    for (uint64_t sequence = first_; sequence <= at; ++sequence) {
      for (uint32_t n = 0; n < kMicroBatches; ++n) {
        if (sequence == at && !after_step && n == 2) return;
        CHECK(Backward(sequence, n, ForwardModule(sequence, n)).status.ok());
      }
      EXPECT_EQ(Step(sequence).sequence(), sequence + 1);
      while (caller_.Status(token_).durable_sequence() <= sequence) std::this_thread::yield();
    }
  }
  v1::StepResponse StepAgain() { return Step(first_ - 1); }
  uint64_t first() const { return first_; }

  // Micro-batches at once, last first, some again with what has been spent and some with x; each
  // step twice, at once, and once more later.
  std::map<std::string, std::string> Noisy() {
    for (uint64_t sequence = 1; sequence <= kSteps; ++sequence) {
      std::vector<std::thread> calls;
      for (int n = kMicroBatches - 1; n >= 0; --n) {
        calls.emplace_back([this, sequence, n] { RetriedMicroBatch(sequence, n); });
      }
      for (std::thread& call : calls) call.join();
      EXPECT_TRUE(Backward(sequence, 1, "").status.ok());
      std::array<v1::StepResponse, 2> steps;
      std::thread first([&] { steps[0] = Step(sequence); });
      std::thread second([&] { steps[1] = Step(sequence); });
      first.join();
      second.join();
      EXPECT_NE(steps[0].replayed(), steps[1].replayed());
      EXPECT_TRUE(Step(sequence).replayed());
      steps[0].clear_replayed();
      steps[1].clear_replayed();
      EXPECT_EQ(steps[0].SerializeAsString(), steps[1].SerializeAsString());
    }
    return Tensors();
  }

 private:
  static ServerOptions OptionsOf(const std::string& state_dir) {
    ServerOptions options = TestOptions();
    options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
    options.modules.state_dir = state_dir;
    return options;
  }

  static std::string Numbers(uint64_t sequence, uint32_t micro_batch, int what) {
    Random random(sequence * 1000 + micro_batch * 10 + what);
    return RandomBytes(random, kRows * kModuleWidth);
  }
  v1::ModuleForwardHeader HeaderOf(uint64_t sequence, uint32_t micro_batch) const {
    v1::ModuleForwardHeader header = ForwardHeader(token_, sequence, kRows, true);
    header.set_seed(sequence);
    header.set_offset(micro_batch);
    return header;
  }

  std::string ForwardModule(uint64_t sequence, uint32_t micro_batch) {
    const auto forward =
        caller_.Forward(HeaderOf(sequence, micro_batch), {{kX, Numbers(sequence, micro_batch, 0)}});
    CHECK(forward.status.ok()) << forward.status.error_message();
    return forward.header.activations().token();
  }
  // Without activations: x comes again.
  Streamed<v1::ModuleBackwardResult> Backward(uint64_t sequence, uint32_t micro_batch,
                                              const std::string& activations) {
    v1::ModuleBackwardHeader header;
    header.set_token(token_);
    header.set_sequence(sequence);
    header.set_micro_batch(micro_batch);
    header.set_want_dx(true);
    std::vector<Payload> payloads;
    if (activations.empty()) {
      *header.mutable_forward() = HeaderOf(sequence, micro_batch);
      payloads.emplace_back(kX, Numbers(sequence, micro_batch, 0));
    } else {
      header.set_activations(activations);
    }
    payloads.emplace_back(kDy, Numbers(sequence, micro_batch, 1));
    return caller_.Backward(std::move(header), payloads);
  }
  void RetriedMicroBatch(uint64_t sequence, uint32_t micro_batch) {
    const std::string activations = ForwardModule(sequence, micro_batch);
    const auto first = Backward(sequence, micro_batch, activations);
    EXPECT_TRUE(first.status.ok()) << first.status.error_message();
    EXPECT_TRUE(first.header.added());
    const auto spent = Backward(sequence, micro_batch, activations);
    EXPECT_EQ(ErrorInfoOf(spent.status).reason(), "LEASE_LOST");
    const auto again = Backward(sequence, micro_batch, "");
    EXPECT_TRUE(again.status.ok()) << again.status.error_message();
    EXPECT_FALSE(again.header.added());
    EXPECT_EQ(again.payload, first.payload);  // the same bits of dx
  }
  v1::StepResponse Step(uint64_t sequence) {
    v1::StepRequest request = StepOf(token_, sequence, kMicroBatches);
    v1::StepResponse response;
    const grpc::Status status = caller_.Step(request, response);
    CHECK(status.ok()) << status.error_message();
    return response;
  }
  std::map<std::string, std::string> Tensors() {
    v1::GetTensorsRequest request;
    request.set_token(token_);
    request.set_sequence(kSteps + 1);
    request.add_kind(v1::TENSOR_KIND_WEIGHT);
    request.add_kind(v1::TENSOR_KIND_MOMENT1);
    std::map<std::string, std::string> tensors;
    CHECK(caller_.Get(request, tensors).ok());
    return tensors;
  }

  Daemon daemon_;
  ModuleCaller caller_;
  std::string token_;
  uint64_t first_ = 1;
};

TEST(ModuleRetries, LeaveTheWeightsOfTheQuietRun) {
  const auto quiet = Training(Cpu()).Quiet();
  EXPECT_EQ(quiet.size(), 8);
  EXPECT_EQ(Training(Cpu()).Noisy(), quiet);
}

TEST(ModuleRetries, GoOnFromTheStateThatOutlivedTheProcess) {
  const auto quiet = Training(Cpu()).Quiet();
  const std::string states = testing::TempDir() + "/module_states";
  std::filesystem::remove_all(states);
  std::filesystem::create_directory(states);
  Training(Cpu(), states).DieAt(3, false);
  {
    Training second(Cpu(), states);
    EXPECT_EQ(second.first(), 3);
    second.DieAt(7, true);
  }
  Training third(Cpu(), states);
  EXPECT_EQ(third.first(), 8);
  EXPECT_TRUE(third.StepAgain().replayed());  // its reply was lost with the process
  EXPECT_EQ(third.Quiet(), quiet);
}

TEST(ModuleRetries, WouldShowAMicroBatchThatIsAddedTwice) {
  const auto quiet = Training(ForgetfulDevice()).Quiet();
  EXPECT_NE(Training(ForgetfulDevice()).Noisy(), quiet);
}

}  // namespace
}  // namespace attnd
