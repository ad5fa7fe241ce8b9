// The C++ client's shared memory with a real daemon: the bytes that the socket gives, with one copy
// or none; and what becomes of calls when it cannot be had, or goes away.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/gated_daemon.h"
#include "tests/fixtures/unique_name.h"

namespace attnd {
namespace {

ServerOptions UnixOptions() {
  ServerOptions options = TestOptions();
  options.listen = {UniqueName("unix:/tmp/attnd_client_shm_")};
  return options;
}

std::unique_ptr<AttentionClient> SharingClient(const std::string& address,
                                               int64_t shared_bytes = int64_t{256} << 20) {
  auto client = AttentionClient::Connect({.addresses = {address},
                                          .channels_per_address = 3,
                                          .shard_bytes = int64_t{1} << 20,
                                          .shared_memory_bytes = shared_bytes});
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

// Forward, then backward. Gives the shards whose tensors did not travel.
int64_t Step(AttentionClient& client, const Problem& p, const ProblemInputs& in, Outputs& out) {
  auto forward = client.Forward(p, ForwardInputs(in), out.forward());
  EXPECT_TRUE(forward.ok()) << forward.status();
  auto backward = client.Backward(p, BackwardInputs(in, out), out.backward());
  EXPECT_TRUE(backward.ok()) << backward.status();
  if (!forward.ok() || !backward.ok()) return -1;
  return forward->shared + backward->shared;
}

Problem MiddlingProblem() {  // 1.1 MB each of q and o
  Problem p;
  p.batch = 3;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = 307;
  p.kv_len = 251;
  p.qk_head_dim = 76;
  p.v_head_dim = 60;
  return p;
}

TEST(ClientSharedMemory, GivesTheBytesThatTheSocketGives) {
  Daemon daemon(MakeCpuBackend({.threads = 2}), UnixOptions());
  auto shared = SharingClient(daemon.address()), socket = SharingClient(daemon.address(), 0);
  for (Layout layout : {Layout::kBhld, Layout::kBlhd}) {
    for (bool bias : {false, true}) {
      Problem p = MiddlingProblem();
      p.layout = layout;
      if (bias) p.bias = Bias{ElementType::kFloat32, {1, 1, p.q_len, p.kv_len}, true};
      SCOPED_TRACE(ProblemText(p));
      ProblemInputs in = RandomInputs(p, 1);
      Outputs expected(p), got(p);
      EXPECT_EQ(Step(*socket, p, in, expected), 0);
      EXPECT_GT(Step(*shared, p, in, got), 2);
      EXPECT_TRUE(got == expected);
    }
  }
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 1 << 16, .max_head_dim = 128});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(p));
    ProblemInputs in = RandomInputs(p, seed);
    Outputs expected(p), got(p);
    EXPECT_EQ(Step(*socket, p, in, expected), 0);
    EXPECT_GE(Step(*shared, p, in, got), 0);
    EXPECT_TRUE(got == expected);
  }
}

TEST(ClientSharedMemory, CopiesNothingThatLiesThere) {
  Daemon daemon(MakeCpuBackend({.threads = 2}), UnixOptions());
  auto client = SharingClient(daemon.address());
  Problem p = MiddlingProblem();
  p.layout = Layout::kBlhd;
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected(p);
  Step(*client, p, in, expected);
  auto place = [&](const AlignedBytes& tensor) {
    std::shared_ptr<std::byte> memory = *client->Allocate(tensor.size());
    std::memcpy(memory.get(), tensor.data(), static_cast<size_t>(tensor.size()));
    return memory;
  };
  auto q = place(in.q), k = place(in.k), v = place(in.v);
  auto o = *client->Allocate(expected.o.size()), lse = *client->Allocate(expected.lse.size());
  auto receipt = client->Forward(p, {q.get(), k.get(), v.get()},
                                 {o.get(), reinterpret_cast<float*>(lse.get())});
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->shared, receipt->shards);
  EXPECT_EQ(receipt->bytes_copied, 0);
  EXPECT_FALSE(receipt->kernel.empty());
  EXPECT_EQ(std::memcmp(o.get(), expected.o.data(), static_cast<size_t>(expected.o.size())), 0);
  EXPECT_EQ(std::memcmp(lse.get(), expected.lse.data(), static_cast<size_t>(expected.lse.size())),
            0);
}

// One head, which computes for much longer than its bytes take: each device has a part of its rows.
TEST(ClientSharedMemory, CutsALongCallForEachDevice) {
  std::vector<Device> devices;
  std::vector<GatedBackend*> gates;
  for (int n = 0; n < 2; ++n) {
    auto engine = std::make_unique<GatedBackend>();
    gates.push_back(engine.get());
    devices.push_back(std::move(engine));
  }
  Daemon daemon(std::move(devices), UnixOptions());
  std::vector<int> launched;  // when the daemon started
  for (GatedBackend* gate : gates) {
    gate->Close();
    launched.push_back(static_cast<int>(gate->launches().size()));
  }
  auto client = SharingClient(daemon.address());
  Problem p = PlainProblem(1, 1, 45056, 8);
  p.element = ElementType::kFloat16;
  ProblemInputs in = RandomInputs(p, 1);
  Outputs out(p);
  std::stop_source stop;
  std::thread caller([&] {
    const CallOptions options{.timeout = absl::Minutes(9), .stop = stop.get_token()};
    const auto done = client->Forward(p, ForwardInputs(in), out.forward(), options);
    EXPECT_TRUE(absl::IsCancelled(done.status())) << done.status();
  });
  for (size_t n = 0; n < gates.size(); ++n) gates[n]->WaitForLaunches(launched[n] + 1);
  int64_t rows = 0;
  for (GatedBackend* gate : gates) {
    const int64_t of_device = gate->launches().back().at(0);
    EXPECT_NEAR(static_cast<double>(of_device), static_cast<double>(p.q_len) / 2, 128);
    rows += of_device;
  }
  EXPECT_EQ(rows, p.q_len);
  stop.request_stop();
  caller.join();
}

// By an engine that copies them to host memory, and by one with a memory of its own.
TEST(ClientSharedMemory, HasTensorsKept) {
  for (bool on_device : {false, true}) {
    SCOPED_TRACE(on_device);
    auto gpu = std::make_unique<GatedBackend>();
    gpu->SetDeviceBytes(1 << 20, 64 << 20);
    gpu->KeepResiduals(1 << 20);
    std::unique_ptr<Backend> engine = std::move(gpu);
    if (!on_device) engine = MakeCpuBackend({.threads = 2});
    Daemon daemon(std::move(engine), UnixOptions());
    auto client = SharingClient(daemon.address());
    Problem p = MiddlingProblem();
    ProblemInputs in = RandomInputs(p, 1);
    Outputs expected(p), got(p);
    Step(*client, p, in, expected);
    Residual kept;
    auto forward = client->Forward(p, ForwardInputs(in), got.forward(), {}, &kept);
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_GT(forward->shared, 0);
    EXPECT_EQ(daemon.server().use().lease_bytes == 0, on_device);
    auto backward = client->Backward(p, BackwardInputs(in, got), got.backward(), {}, &kept);
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_EQ(backward->leased, backward->shards);
    EXPECT_TRUE(got == expected);
  }
}

// Large tensors in shared memory, and a daemon whose staging memory has no room for them.
class KeptOnDevice : public testing::Test {
 protected:
  static constexpr int64_t kMiB = 1 << 20;
  using Memory = std::shared_ptr<std::byte>;

  KeptOnDevice() {
    auto gpu = std::make_unique<GatedBackend>();
    gpu->SetDeviceBytes(64 * kMiB, 1024 * kMiB);
    gpu->KeepResiduals(20 * kMiB);
    gpu_ = gpu.get();
    ServerOptions options = UnixOptions();
    options.admission.memory_bytes = options.admission.caller_max_bytes = 8 * kMiB;
    daemon_ = std::make_unique<Daemon>(std::move(gpu), options);
    client_ = SharingClient(daemon_->address());
    q_ = Place(in_.q), k_ = Place(in_.k), v_ = Place(in_.v), d_o_ = Place(in_.d_o);
    o_ = Place(expected_.o);
    d_q_ = Place(expected_.d_q), d_k_ = Place(expected_.d_k), d_v_ = Place(expected_.d_v);
    for (const Memory& output : {o_, d_q_, d_k_, d_v_}) output.get()[5] ^= std::byte{1};
  }

  static Problem LargeProblem() {
    Problem p;
    p.batch = 1;
    p.q_heads = p.kv_heads = 16;
    p.q_len = 8192;
    p.kv_len = 1;
    p.qk_head_dim = p.v_head_dim = 32;  // 16 MiB each of q and o
    return p;
  }
  Memory Place(const AlignedBytes& tensor) {
    Memory memory = *client_->Allocate(tensor.size());
    std::memcpy(memory.get(), tensor.data(), static_cast<size_t>(tensor.size()));
    return memory;
  }
  absl::StatusOr<CallReceipt> Forward(Residual& residual) {
    return client_->Forward(problem_, {q_.get(), k_.get(), v_.get()}, {o_.get(), lse_.as<float>()},
                            {}, &residual);
  }
  absl::StatusOr<CallReceipt> Backward(const Residual& residual) {
    BackwardTensors in = BackwardInputs(in_, expected_);
    in.q = q_.get(), in.k = k_.get(), in.v = v_.get(), in.o = o_.get(), in.d_o = d_o_.get();
    in.lse = lse_.as<float>();
    return client_->Backward(problem_, in, {d_q_.get(), d_k_.get(), d_v_.get()}, {}, &residual);
  }
  static void ExpectSame(const Memory& memory, const AlignedBytes& tensor) {
    EXPECT_EQ(std::memcmp(memory.get(), tensor.data(), static_cast<size_t>(tensor.size())), 0);
  }
  void ExpectGradients() {
    ExpectSame(d_q_, expected_.d_q);
    ExpectSame(d_k_, expected_.d_k);
    ExpectSame(d_v_, expected_.d_v);
  }

  const Problem problem_ = LargeProblem();
  const ProblemInputs in_ = RandomInputs(problem_, 1);
  ReferenceBackend engine_;
  const Outputs expected_ = RunWhole(engine_, problem_, in_);
  AlignedBytes lse_ = Unwritten(problem_.LseElements() * 4);
  GatedBackend* gpu_;  // the daemon's
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<AttentionClient> client_;
  Memory q_, k_, v_, d_o_, o_, d_q_, d_k_, d_v_;
};

TEST_F(KeptOnDevice, CopiesNothingThatLiesThere) {
  Residual residual;
  auto forward = Forward(residual);
  ASSERT_TRUE(forward.ok()) << forward.status();
  EXPECT_EQ(forward->shards, 1);
  EXPECT_EQ(forward->shared, 1);
  EXPECT_EQ(forward->leased, 1);
  EXPECT_EQ(forward->bytes_copied, 0);
  ExpectSame(o_, expected_.o);
  std::memset(q_.get(), 0x7f, static_cast<size_t>(in_.q.size()));  // the caller's again
  std::memset(o_.get(), 0x7f, static_cast<size_t>(expected_.o.size()));
  auto backward = Backward(residual);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_EQ(backward->leased, 1);
  ExpectGradients();
}

TEST_F(KeptOnDevice, LeavesAllToBackwardWithoutRoomThere) {
  gpu_->HoldNothing();
  Residual residual;
  auto forward = Forward(residual);
  ASSERT_TRUE(forward.ok()) << forward.status();
  EXPECT_EQ(forward->leased, 0);
  ExpectSame(o_, expected_.o);
  auto backward = Backward(residual);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_EQ(backward->leased, 0);
  EXPECT_EQ(backward->shared, 1);
  ExpectGradients();
}

TEST(ClientSharedMemory, GivesMemoryBackWhenItsLastOwnerGoes) {
  Daemon daemon(MakeCpuBackend({.threads = 2}), UnixOptions());
  auto client = SharingClient(daemon.address(), int64_t{64} << 20);
  for (int n = 0; n < 100; ++n) {
    auto memory = client->Allocate(int64_t{60} << 20);
    ASSERT_TRUE(memory.ok());
    std::memset(memory->get(), n, size_t{60} << 20);
  }
  EXPECT_EQ(daemon.server().shared_memory_use().regions, 1);
  auto outlives = *client->Allocate(1000);
  client.reset();
  std::memset(outlives.get(), 1, 1000);
}

TEST(ClientSharedMemory, SendsTensorsWhereThereIsNone) {
  ServerOptions off = UnixOptions();
  off.shared_memory.enabled = false;
  ServerOptions small = UnixOptions();
  small.shared_memory.max_bytes = 1 << 20;  // below a region
  for (const ServerOptions& options : {off, small}) {
    Daemon daemon(MakeCpuBackend({.threads = 2}), options);
    Problem p = MiddlingProblem();
    ProblemInputs in = RandomInputs(p, 1);
    Outputs expected(p), got(p);
    EXPECT_EQ(Step(*SharingClient(daemon.address(), 0), p, in, expected), 0);
    auto client = SharingClient(daemon.address());
    EXPECT_EQ(Step(*client, p, in, got), 0);
    EXPECT_TRUE(got == expected);
    auto memory = client->Allocate(1 << 20);
    ASSERT_TRUE(memory.ok());
    std::memset(memory->get(), 1, 1 << 20);
  }
}

TEST(ClientSharedMemory, SendsTensorsToADaemonThatWasStartedAnew) {
  ServerOptions options = UnixOptions();
  auto daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), options);
  auto client = AttentionClient::Connect({.addresses = {options.listen[0]},
                                          .wait_for_ready = true,
                                          .shared_memory_bytes = int64_t{256} << 20});
  ASSERT_TRUE(client.ok());
  Problem p = MiddlingProblem();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected(p), got(p);
  EXPECT_GT(Step(**client, p, in, expected), 0);
  daemon.reset();
  daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), options);
  EXPECT_GE(Step(**client, p, in, got), 0);
  EXPECT_TRUE(got == expected);
}

TEST(ClientSharedMemory, HasItsMemoryBackWhenACancelledCallReturns) {
  GatedDaemon gated(UnixOptions());
  Daemon& daemon = *gated.daemon;
  auto client = SharingClient(daemon.address(), int64_t{64} << 20);
  Problem p = MiddlingProblem();
  p.batch = 1;
  p.causal = true;
  p.alignment = Alignment::kTopLeft;
  ProblemInputs in = RandomInputs(p, 1);
  Outputs out(p);
  gated.engine->Close();
  std::stop_source stop;
  absl::Status status;
  std::thread call([&] {
    CallOptions options;
    options.stop = stop.get_token();
    status = client->Forward(p, {in.q.data(), in.k.data(), in.v.data()}, {out.o.data()}, options)
                 .status();
  });
  gated.WaitForLaunches(1);
  stop.request_stop();
  call.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(daemon.server().use().calls, 0);  // the daemon let go before the client did
  gated.engine->Open();
  auto receipt = client->Forward(p, {in.q.data(), in.k.data(), in.v.data()}, {out.o.data()});
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_GT(receipt->shared, 0);
}

TEST(ClientSharedMemory, ServesManyCallsAtOnce) {
  Daemon daemon(MakeCpuBackend({.threads = 2}), UnixOptions());
  auto client = SharingClient(daemon.address());
  Problem p = MiddlingProblem();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected(p);
  Step(*client, p, in, expected);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int n = 0; n < 5; ++n) {
        Outputs got(p);
        EXPECT_GT(Step(*client, p, in, got), 0);
        EXPECT_TRUE(got == expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(daemon.server().staging_used(), 0);
}

}  // namespace
}  // namespace attnd
