// Residuals that lie on a device, end to end: a real server over two engines with memory of their
// own (GatedBackend), a generated client and attnd's. Backward goes where its residual is, memory
// is counted there and gives way there, and a device's loss is an ordinary loss of its leases.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "tests/daemon/lease_caller.h"
#include "tests/fakes/fake_driver.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr int64_t kMemory = int64_t{8} << 20;  // of a device
constexpr int64_t kCall = int64_t{1} << 20;    // of it, by each call
constexpr int64_t kKept = int64_t{1} << 19;    // of that, what a kept forward leaves

ServerOptions Options() {
  ServerOptions options = TestOptions();
  options.token_file = TokenFile();
  options.lease_hbm_fraction = 0.5;  // eight residuals
  options.leases.min_hold = absl::ZeroDuration();
  options.nvml_library = FakeDriver::kLibrary;
  return options;
}

// A daemon with some devices; the engines are the test's to close and to break.
class Gpus {
 public:
  explicit Gpus(int count, const ServerOptions& options = Options()) {
    const char* const kBusIds[] = {"0000:3b:00.0", "0000:3c:00.0"};  // the stand-in driver's
    std::vector<Device> engines;
    for (int n = 0; n < count; ++n) {
      auto engine = std::make_unique<GatedBackend>();
      engine->SetDeviceBytes(kCall, kMemory);
      engine->KeepResiduals(kKept);
      engine->SetPciBusId(kBusIds[n]);
      gpus_.push_back(engine.get());
      engines.push_back(std::move(engine));
    }
    daemon_ = std::make_unique<Daemon>(std::move(engines), options);
  }
  Daemon& daemon() { return *daemon_; }
  AttndServer& server() { return daemon_->server(); }
  GatedBackend& gpu(int n) { return *gpus_[n]; }
  // The GPU that holds the residual.
  int holder() const {
    for (size_t n = 0; n < gpus_.size(); ++n) {
      if (gpus_[n]->held_bytes() > 0) return static_cast<int>(n);
    }
    return -1;
  }
  void WaitForNothing() {
    while (server().use().bytes != 0 || server().staging_used() != 0) std::this_thread::yield();
    for (int n = 0; n < static_cast<int>(gpus_.size()); ++n) {
      while (server().use(n).memory_bytes != 0) std::this_thread::yield();
    }
  }

 private:
  std::vector<GatedBackend*> gpus_;
  std::unique_ptr<Daemon> daemon_;
};

TEST(DaemonGpuLease, KeepsTensorsOnTheDeviceAndNoneInStagingMemory) {
  Gpus gpus(2);
  LeaseCaller alice(gpus.daemon(), kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  ASSERT_TRUE(forward.has_residual());
  EXPECT_EQ(forward.residual().bytes_held(), kKept);
  gpus.WaitForNothing();
  const int holder = gpus.holder();
  ASSERT_GE(holder, 0);
  EXPECT_EQ(gpus.server().leases(holder).bytes, kKept);
  EXPECT_EQ(gpus.server().use(holder).lease_bytes, kKept);
  EXPECT_EQ(gpus.server().use().lease_bytes, 0);  // of staging memory

  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, forward);
  v1::BackwardResponse expected, got;
  ASSERT_TRUE(alice.Backward(whole, &expected).ok());
  for (int retry = 0; retry < 2; ++retry) {
    ASSERT_TRUE(alice.Backward(Leased(whole, forward.residual().token()), &got).ok());
    EXPECT_EQ(got.d_q(), expected.d_q());
    EXPECT_EQ(got.d_k(), expected.d_k());
    EXPECT_EQ(got.d_v(), expected.d_v());
  }
  EXPECT_TRUE(alice.Release(forward.residual().token()).ok());
  gpus.WaitForNothing();
  EXPECT_EQ(gpus.gpu(holder).held_bytes(), 0);
  EXPECT_EQ(gpus.server().use(holder).lease_bytes, 0);
}

TEST(DaemonGpuLease, WaitsForTheDeviceThatHoldsItWhenAnotherIsIdle) {
  Gpus gpus(2);
  LeaseCaller alice(gpus.daemon(), kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  const int holder = gpus.holder();
  ASSERT_GE(holder, 0);
  GatedBackend& busy = gpus.gpu(holder);
  GatedBackend& idle = gpus.gpu(1 - holder);
  const size_t before = idle.launches().size();
  busy.Close();
  const int launches = static_cast<int>(busy.launches().size());
  std::vector<std::thread> callers;
  for (int n = 0; n < 6; ++n) {
    callers.emplace_back([&] {
      LeaseCaller own(gpus.daemon(), kAlice);
      grpc::Status status = own.Backward(
          Leased(MakeBackward(SmallProblem(), 1, forward), forward.residual().token()));
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  }
  busy.WaitForLaunches(launches + 1);
  while (gpus.server().use(holder).calls < 6) std::this_thread::yield();
  EXPECT_EQ(gpus.server().use(1 - holder).calls, 0);
  EXPECT_TRUE(alice.Backward(MakeBackward(SmallProblem(), 1, forward)).ok());  // stateless: idle
  busy.Open();
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(idle.launches().size(), before + 1);
}

TEST(DaemonGpuLease, GivesWayToCallsThatNeedTheDevicesMemory) {
  Gpus gpus(1);
  LeaseCaller alice(gpus.daemon(), kAlice);
  std::string oldest = alice.Keep(SmallProblem()).residual().token();
  v1::ForwardResponse forward;
  for (int n = 1; n < 8; ++n) forward = alice.Keep(SmallProblem());
  EXPECT_EQ(gpus.gpu(0).held_bytes(), 8 * kKept);
  gpus.gpu(0).SetDeviceBytes(5 * kCall, kMemory);  // one of eight MiB is missing
  EXPECT_TRUE(alice.Backward(MakeBackward(SmallProblem(), 1, forward)).ok());
  EXPECT_EQ(gpus.gpu(0).held_bytes(), 6 * kKept);
  grpc::Status status = alice.Renew(oldest, 0);
  ExpectError(status, grpc::StatusCode::FAILED_PRECONDITION, "LEASE_LOST");
  EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "evicted");
  EXPECT_TRUE(alice.Renew(forward.residual().token(), 0).ok());
}

TEST(DaemonGpuLease, EvictsWhereTheDevicesMemoryLiesInPieces) {
  Gpus gpus(1);
  LeaseCaller alice(gpus.daemon(), kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  alice.Keep(SmallProblem());
  gpus.gpu(0).FailWith(absl::ResourceExhaustedError("no room for 1048576 bytes"));
  grpc::Status status = alice.Backward(MakeBackward(SmallProblem(), 1, forward));
  ExpectError(status, grpc::StatusCode::UNAVAILABLE, "HBM_PRESSURE");
  EXPECT_EQ(gpus.gpu(0).held_bytes(), 0);  // each made way for another try
  gpus.gpu(0).FailWith(absl::OkStatus());
  EXPECT_TRUE(alice.Backward(MakeBackward(SmallProblem(), 1, forward)).ok());
}

TEST(DaemonGpuLease, IsLostWithItsDevice) {
  Gpus gpus(2);
  LeaseCaller alice(gpus.daemon(), kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  const int holder = gpus.holder();
  ASSERT_GE(holder, 0);
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, forward);
  v1::BackwardRequest leased = Leased(whole, forward.residual().token());
  gpus.gpu(holder).FailWith(DeviceLost(absl::InternalError("cuEventQuery: an illegal address")));
  ExpectError(alice.Backward(leased), grpc::StatusCode::UNAVAILABLE, "DEVICE_LOST");
  grpc::Status status = alice.Backward(leased);
  ExpectError(status, grpc::StatusCode::FAILED_PRECONDITION, "LEASE_LOST");
  EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "device_lost");
  EXPECT_EQ(gpus.gpu(holder).held_bytes(), 0);
  EXPECT_TRUE(alice.Backward(whole).ok());  // by the other
  EXPECT_EQ(gpus.server().use(holder).lease_bytes, 0);
}

TEST(DaemonGpuLease, IsLostWhenNvmlTellsOfItsDevicesEnd) {
  FakeDriver fake;
  Gpus gpus(2);
  LeaseCaller alice(gpus.daemon(), kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  const int holder = gpus.holder();
  ASSERT_GE(holder, 0);
  fake.xid(holder, 79);  // it fell off the bus; no CUDA call has been made since
  while (!gpus.server().device_lost()) std::this_thread::yield();
  grpc::Status status =
      alice.Backward(Leased(MakeBackward(SmallProblem(), 1, forward), forward.residual().token()));
  ExpectError(status, grpc::StatusCode::FAILED_PRECONDITION, "LEASE_LOST");
  EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "device_lost");
  EXPECT_TRUE(alice.Backward(MakeBackward(SmallProblem(), 1, forward)).ok());  // by the other
}

// A user of the client library sees nothing of all that.
TEST(DaemonGpuLease, ClientsResendByThemselvesWhenTheDeviceIsLost) {
  ServerOptions options = Options();
  options.token_file = "";
  Gpus gpus(2, options);
  auto client = AttentionClient::Connect({.addresses = {gpus.daemon().address()}});
  ASSERT_TRUE(client.ok()) << client.status();
  const Problem problem = SmallProblem();
  const ProblemInputs in = RandomInputs(problem, 3);
  Outputs out(problem), again(problem);
  Residual residual;
  auto forward = (*client)->Forward(problem, ForwardInputs(in), out.forward(), {}, &residual);
  ASSERT_TRUE(forward.ok()) << forward.status();
  EXPECT_EQ(forward->leased, forward->shards);
  auto stateless = (*client)->Backward(problem, BackwardInputs(in, out), out.backward(), {});
  ASSERT_TRUE(stateless.ok()) << stateless.status();
  const int holder = gpus.holder();
  ASSERT_GE(holder, 0);
  gpus.gpu(holder).FailWith(DeviceLost(absl::InternalError("cuEventQuery: an illegal address")));
  auto backward =
      (*client)->Backward(problem, BackwardInputs(in, out), again.backward(), {}, &residual);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_EQ(backward->leased, 0);
  EXPECT_TRUE(again.d_q == out.d_q);
  EXPECT_TRUE(again.d_v == out.d_v);
}

// A process for each GPU, as docs/DEPLOY.md advises: what one of them loses is all that travels
// again, and nobody is refused.
TEST(DaemonGpuLease, ClientsOfAProcessForEachGpuLoseWhatOneOfThemHeld) {
  ServerOptions options = Options();
  options.token_file = "";
  Gpus first(1, options), second(1, options);
  auto client = AttentionClient::Connect(
      {.addresses = {first.daemon().address(), second.daemon().address()}, .shard_bytes = 1});
  ASSERT_TRUE(client.ok()) << client.status();
  const Problem problem = SmallProblem(16, 8);
  const ProblemInputs in = RandomInputs(problem, 3);
  Outputs out(problem), again(problem);
  Residual residual;
  auto forward = (*client)->Forward(problem, ForwardInputs(in), out.forward(), {}, &residual);
  ASSERT_TRUE(forward.ok()) << forward.status();
  ASSERT_EQ(forward->leased, 8);
  auto stateless = (*client)->Backward(problem, BackwardInputs(in, out), out.backward(), {});
  ASSERT_TRUE(stateless.ok()) << stateless.status();
  const int64_t stay = second.server().leases(0).leases;
  ASSERT_GT(first.server().leases(0).leases, 0);
  ASSERT_GT(stay, 0);
  first.gpu(0).FailWith(DeviceLost(absl::InternalError("cuEventQuery: an illegal address")));
  auto backward =
      (*client)->Backward(problem, BackwardInputs(in, out), again.backward(), {}, &residual);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_EQ(backward->leased, stay);
  EXPECT_TRUE(again.d_q == out.d_q);
  EXPECT_TRUE(again.d_v == out.d_v);
  EXPECT_TRUE(first.server().device_lost());
  EXPECT_FALSE(second.server().device_lost());
  auto after = (*client)->Forward(problem, ForwardInputs(in), again.forward());
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_TRUE(again.o == out.o);
}

}  // namespace
}  // namespace attnd
