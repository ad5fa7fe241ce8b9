// Memory of modules that come and go: the process has none of it once they are released.
#include <gtest/gtest.h>
#include <malloc.h>

#include <map>
#include <string>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr uint32_t kWidth = 1024;  // 4 MiB a weight; 33 MiB a module
constexpr int kRounds = 60, kWarmUp = 5;
// gRPC's messages of the tensors take more of the heap now and then, some 24 MiB at a time, and
// then no more; a module that stayed would take hundreds.
constexpr int64_t kSlack = 100 * kMiB;

v1::RegisterModuleRequest WideRegistration() {
  v1::RegisterModuleRequest request = SmallRegistration("wide");
  v1::ModuleLayout& layout = *request.mutable_layout();
  layout.set_width(kWidth);
  v1::Block& block = *layout.mutable_block(0);
  for (v1::Parameter& parameter : *block.mutable_parameter()) {
    for (int n = 0; n < parameter.shape_size(); ++n) parameter.set_shape(n, kWidth);
  }
  return request;
}

double ResidentOf(const Counts& counts, const char* kind) {
  return counts.Of("attnd_resident_bytes", {{"kind", kind}});
}

// Within a tenth of what the system says: all kinds together, and modules and staging memory as
// they come.
TEST(DaemonModuleMemory, IsToldWithAllThatTheProcessHolds) {
  ServerOptions options = WithMetrics();
  options.modules.memory = {96 * kMiB, 96 * kMiB};
  Daemon daemon(CpuDeviceOf({.threads = 1}), options);
  const Counts counts(daemon);
  ModuleCaller caller(daemon.NewChannel());
  v1::RegisterModuleResponse registered;
  ASSERT_TRUE(caller.Register(SmallRegistration("warm"), registered).ok());
  ExpectHealthy(daemon);
  const double tensors = ResidentOf(counts, "tensors"), staging = ResidentOf(counts, "staging");
  const auto before = static_cast<double>(ResidentBytes());
  ASSERT_TRUE(caller.Register(WideRegistration(), registered).ok());
  const double of_module = static_cast<double>(registered.status().host_bytes());
  EXPECT_GT(of_module, 30 * kMiB);
  EXPECT_NEAR(ResidentOf(counts, "tensors") - tensors, of_module, of_module / 10);
  EXPECT_NEAR(static_cast<double>(ResidentBytes()) - before, of_module, of_module / 10);

  grpc::ClientContext context;
  v1::ForwardResponse reply;
  const grpc::Status status =  // 12 MiB in
      daemon.stub().Forward(&context, MakeForward(SmallProblem(1024, 128), 1), &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  const double staged = ResidentOf(counts, "staging") - staging;
  EXPECT_GT(staged, 12 * kMiB);
  EXPECT_LT(staged, 24 * kMiB);

  const double all = counts.Of("process_resident_memory_bytes", {});
  EXPECT_NEAR(counts.Of("attnd_resident_bytes", {}), all, all / 10);
}

TEST(DaemonModuleMemory, IsGoneOnceModulesAreReleased) {
  // As TuneForTransport has it: the heap keeps what is freed.
  mallopt(M_TRIM_THRESHOLD, 2000000000);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ServerOptions options = TestOptions();
  options.modules.memory = {64 * kMiB, 64 * kMiB};
  Daemon daemon(CpuDeviceOf({.threads = 1}), options);
  ModuleCaller caller(daemon.NewChannel());
  int64_t before = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (round == kWarmUp) before = ResidentBytes();
    v1::RegisterModuleResponse registered;
    const grpc::Status status = caller.Register(WideRegistration(), registered);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_GT(daemon.server().module_bytes(), 30 * kMiB);
    v1::GetTensorsRequest get;
    get.set_token(registered.token());
    std::map<std::string, std::string> tensors;
    EXPECT_TRUE(caller.Get(get, tensors).ok());
    EXPECT_EQ(tensors["layer1.weight/1"].size(), sizeof(float) * kWidth * kWidth);
    v1::ReleaseModuleRequest release;
    v1::ReleaseModuleResponse released;
    release.set_token(registered.token());
    ASSERT_TRUE(caller.Call(&v1::Modules::Stub::Release, release, released).ok());
    EXPECT_EQ(daemon.server().module_bytes(), 0);
    if (round >= kWarmUp) {
      ASSERT_LT(ResidentBytes() - before, kSlack) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace attnd
