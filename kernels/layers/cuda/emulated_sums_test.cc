// Sums of replicas on emulated GPUs of one process, by a stand-in for NCCL: the order of additions,
// whatever the count of numbers, and that the numbers themselves stay.
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/round_up.h"
#include "gtest/gtest.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "modules/arena.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd {
namespace {

// A replica's numbers on a device of its own.
class Replica {
 public:
  Replica(const Nccl& nccl, const std::vector<float>& numbers)
      : engine_(cuda::MakeEmulatedEngine()), device_(*engine_, nullptr, &nccl) {
    const int64_t bytes = RoundUp(4 * static_cast<int64_t>(numbers.size()), kTensorAlignment) +
                          RoundUp(device_.OwnBytes(), kArenaAlignment);
    at_ = reinterpret_cast<float*>(*device_.Allocate(bytes));
    std::memcpy(at_, numbers.data(), numbers.size() * sizeof(float));
    count_ = static_cast<int64_t>(numbers.size());
  }
  absl::Status Sum(const ReplicaCall& call) {
    ReplicaSums& sums = *device_.replica_sums();
    if (absl::Status prepared = sums.Prepare(count_, call.replicas); !prepared.ok()) {
      return prepared;
    }
    return sums.Sum(call, at_, count_);
  }
  std::vector<float> sums() { return {Sums(), Sums() + count_}; }
  std::vector<float> numbers() const { return {at_, at_ + count_}; }

 private:
  const float* Sums() { return device_.replica_sums()->sums(); }

  std::unique_ptr<cuda::CudaBackend> engine_;
  CudaDevice device_;
  float* at_ = nullptr;  // the emulator's device memory is the host's
  int64_t count_ = 0;
};

TEST(ReplicaSums, AreAddedInTheOrderOfReplicas) {
  const auto nccl = Nccl::Load("tests/fakes/libfake_nccl.so");
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  constexpr int kReplicas = 3;
  for (const int count : {1, 100, 129, 1000}) {
    SCOPED_TRACE(count);
    std::vector<std::vector<float>> numbers(kReplicas);
    for (int n = 0; n < count; ++n) {  // (a + b) + c is not a + (b + c), nor (c + b) + a
      numbers[0].push_back(1.0f + static_cast<float>(n));
      numbers[1].push_back(0x1p25f);
      numbers[2].push_back(-0x1p25f);
    }
    std::vector<std::unique_ptr<Replica>> replicas;
    for (const auto& of : numbers) replicas.push_back(std::make_unique<Replica>(**nccl, of));
    const std::string group = *(*nccl)->NewId();
    std::vector<std::thread> threads;
    for (int n = 0; n < kReplicas; ++n) {
      threads.emplace_back([&, n] {
        const absl::Status summed =
            replicas[n]->Sum({.group = group, .replica = n, .replicas = kReplicas});
        EXPECT_TRUE(summed.ok()) << summed;
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<float> expected;
    for (int n = 0; n < count; ++n) {
      expected.push_back((numbers[0][n] + numbers[1][n]) + numbers[2][n]);
    }
    for (int n = 0; n < kReplicas; ++n) {
      EXPECT_EQ(replicas[n]->sums(), expected);
      EXPECT_EQ(replicas[n]->numbers(), numbers[n]);
    }
  }
}

}  // namespace
}  // namespace attnd
