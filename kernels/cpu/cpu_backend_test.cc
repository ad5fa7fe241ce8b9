// The CPU engine on the whole conformance table, with no case left out.
#include "kernels/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stop_token>
#include <thread>
#include <vector>

#include "attention/random_problem.h"
#include "tests/conformance/backend_conformance.h"

namespace attnd {
namespace {

const bool kRegistered =
    RegisterBackendConformance("Cpu", [] { return MakeCpuBackend({.threads = 3}); }, {});

TEST(CpuBackend, SaysWhatItRunsOn) {
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2, .memory_bytes = 12345});
  const BackendInfo& info = backend->info();
  EXPECT_EQ(info.backend, "cpu");
  EXPECT_FALSE(info.device.empty());
  EXPECT_FALSE(info.architecture.empty());
  EXPECT_EQ(info.threads, 2);
  EXPECT_EQ(info.memory_bytes, 12345);
  EXPECT_GT(info.flops_per_second, 1e6);
}

// A forward over all threads, its inputs and its outputs.
struct Launch {
  Launch(int64_t heads, int64_t length)
      : problem(PlainProblem(1, heads, length, 64)),
        inputs(RandomInputs(problem, 1)),
        o(problem.OutputElements() * 4),
        lse(static_cast<size_t>(heads * length)) {}
  absl::Status Run(Backend& backend) {
    const ForwardCall call = {.problem = &problem,
                              .q = inputs.q.data(),
                              .k = inputs.k.data(),
                              .v = inputs.v.data(),
                              .o = o.data(),
                              .lse = lse.data(),
                              .stop = stop.get_token()};
    return backend.Forward({&call, 1}).status();
  }

  Problem problem;
  ProblemInputs inputs;
  AlignedBytes o;
  std::vector<float> lse;
  std::stop_source stop;
};

TEST(CpuBackend, PassesItsThreadsOnWhileALongLaunchRuns) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  // 512 times as long, and 64 times as long as a part of it for which a shorter one may wait.
  Launch shorter(1, 2048), longer(8, 16384);
  std::atomic<bool> is_done = false;
  std::thread other([&] {
    EXPECT_TRUE(longer.Run(*backend).ok());
    is_done = true;
  });
  for (int n = 0; n < 4; ++n) EXPECT_TRUE(shorter.Run(*backend).ok());
  EXPECT_FALSE(is_done);
  longer.stop.request_stop();
  other.join();
}

}  // namespace
}  // namespace attnd
