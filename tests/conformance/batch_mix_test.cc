// A request's result is bitwise the same whatever it is launched with: random mixes of random
// problems, in one launch and in launches side by side, against each problem alone. Small sizes:
// the cpu engine in 1,000 mixes, the sm70 kernels in the emulator in a few, cut into slices.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/conformance/conformance_launch.h"

namespace attnd {
namespace {

// A problem with its inputs and what the engine gives for it alone.
struct OneAlone {
  Problem problem;
  ProblemInputs inputs;
  ForwardResults forward;
  BackwardResults backward;
};

// A launch of some of the problems, both ways, compared with each alone. Every second call is kept
// on the device, where the engine does that.
void ExpectSameInOneLaunch(Backend& engine, const std::vector<const OneAlone*>& mix) {
  std::unique_ptr<CallMemory> memory = MakeHostCallMemory();
  std::vector<LaunchItem> items;
  for (const OneAlone* one : mix) {
    items.push_back({&one->problem, &one->inputs, one->forward.o, one->forward.lse});
    items.back().keep = items.size() % 2 == 0;
  }
  auto forward = LaunchForward(engine, *memory, items);
  ASSERT_TRUE(forward.ok()) << forward.status();
  for (size_t n = 0; n < mix.size(); ++n) {
    items[n].residual = forward->kept[n].get();
    EXPECT_EQ(items[n].residual != nullptr,
              items[n].keep && engine.ResidualBytes(mix[n]->problem) > 0);
  }
  auto backward = LaunchBackward(engine, *memory, items);
  ASSERT_TRUE(backward.ok()) << backward.status();
  for (size_t n = 0; n < mix.size(); ++n) {
    EXPECT_TRUE(forward->results[n] == mix[n]->forward) << "forward, call " << n;
    EXPECT_TRUE(backward->results[n] == mix[n]->backward) << "backward, call " << n;
  }
}

std::vector<OneAlone> MakeReferences(Backend& engine, int count, const RandomProblemLimits& limits,
                                      bool only_half) {
  std::vector<OneAlone> references;
  for (uint64_t seed = 1; static_cast<int>(references.size()) < count; ++seed) {
    OneAlone one;
    one.problem = RandomProblem(seed, limits);
    if (only_half) one.problem.element = ElementType::kFloat16;
    one.problem.allow_nondeterministic = false;
    if (!engine.Supports(one.problem, Direction::kForward).ok() ||
        !engine.Supports(one.problem, Direction::kBackward).ok()) {
      continue;
    }
    one.inputs = RandomInputs(one.problem, seed);
    references.push_back(std::move(one));
    OneAlone& kept = references.back();
    std::unique_ptr<CallMemory> memory = MakeHostCallMemory();
    auto forward = LaunchForward(engine, *memory, {{&kept.problem, &kept.inputs, {}, {}}});
    CHECK(forward.ok()) << forward.status();
    kept.forward = forward->results[0];
    auto backward = LaunchBackward(
        engine, *memory, {{&kept.problem, &kept.inputs, kept.forward.o, kept.forward.lse}});
    CHECK(backward.ok()) << backward.status();
    kept.backward = backward->results[0];
  }
  return references;
}

std::vector<const OneAlone*> RandomMix(const std::vector<OneAlone>& from, Random& random) {
  std::vector<const OneAlone*> mix;
  const int64_t count = random.Between(1, 6);
  for (int64_t n = 0; n < count; ++n) {
    mix.push_back(&from[random.Between(0, static_cast<int64_t>(from.size()) - 1)]);
  }
  return mix;
}

TEST(BatchMix, CpuGivesTheSameBitsInAThousandMixes) {
  constexpr uint64_t kMixes = 1000;
  std::unique_ptr<Backend> engine = MakeCpuBackend({.threads = 2});
  const std::vector<OneAlone> references =
      MakeReferences(*engine, 60, {.max_pairs = 1024, .max_head_dim = 40}, false);
  for (uint64_t seed = 1; seed <= kMixes && !testing::Test::HasFailure(); seed += 2) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const auto mine = RandomMix(references, random), others = RandomMix(references, random);
    std::thread beside([&] { ExpectSameInOneLaunch(*engine, others); });
    ExpectSameInOneLaunch(*engine, mine);
    beside.join();
  }
}

TEST(BatchMix, Sm70KernelsGiveTheSameBitsInMixesThatAreCutIntoSlices) {
  cuda::CudaBackend whole(cuda::MakeEmulatedDevice({}));
  cuda::EmulatedDeviceOptions options;
  options.max_slice_seconds = 1e-3;  // of the emulator's estimate: several slices each
  cuda::CudaBackend sliced(cuda::MakeEmulatedDevice(options));
  const std::vector<OneAlone> references =
      MakeReferences(whole, 8, {.max_pairs = 4096, .max_head_dim = 64}, true);
  for (uint64_t seed = 1; seed <= 8 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    ExpectSameInOneLaunch(sliced, RandomMix(references, random));
  }
}

}  // namespace
}  // namespace attnd
