// The CPU engine on the whole conformance table, with no case left out.
#include "kernels/cpu/cpu_backend.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace attnd
