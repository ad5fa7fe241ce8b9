// The scheduler over simulated GPUs: random calls, cancellations, deadlines and traps against the
// cuda engine's own host code on a stand-in driver (tests/fakes/fake_gpu.h) whose operations
// take random times of a clock of their own. Each schedule ends with every call answered once, the
// right bytes in every answer that is OK, and all memory back. A failure prints its seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/driver_device.h"
#include "server/call/status_details.h"
#include "server/schedule/device_worker.h"
#include "tests/fakes/fake_driver.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

constexpr int64_t kStaging = int64_t{16} << 20;

// Half-precision heads whose kernel stand-in copies q to o.
Problem SimulatedProblem(Random& random) {
  Problem p;
  p.batch = random.Between(1, 2);
  p.q_heads = 2;
  p.kv_heads = random.Between(1, 2);
  p.q_len = random.Between(1, 200);
  p.kv_len = random.Between(1, 200);
  p.qk_head_dim = p.v_head_dim = random.Chance(0.3) ? 40 : 64;
  p.element = ElementType::kFloat16;
  p.causal = random.Chance(0.5);
  p.alignment = Alignment::kTopLeft;
  return p;
}

// Some GPUs with their workers, as the daemon has them.
class SimulatedServer {
 public:
  SimulatedServer(FakeDriver& fake, int gpus, double max_slice_seconds)
      : staging_(*StagingPool::Create(kStaging)),
        leases_(Limits(gpus), TokenIssuer{1, 1}, metrics_, clock_),
        lost_(gpus) {
    fake.set_devices(gpus);
    for (int n = 0; n < gpus; ++n) {
      auto device = cuda::MakeDriverDevice({.ordinal = n,
                                            .driver_library = FakeDriver::kLibrary,
                                            .memory_fraction = 0.0005,  // 7.5 MiB
                                            .max_slice_seconds = max_slice_seconds});
      CHECK(device.ok()) << device.status();
      engines_.push_back(std::make_unique<cuda::CudaBackend>(*std::move(device)));
      metrics_.AddDevice("gpu" + std::to_string(n), engines_.back()->info());
      costs_.emplace_back(1e12);
    }
    std::vector<AdmissionDevice> devices;
    for (int n = 0; n < gpus; ++n) devices.push_back({engines_[n].get(), &costs_[n]});
    admission_ = std::make_unique<Admission>(AdmissionLimits{.memory_bytes = kStaging},
                                             std::move(devices), clock_, &leases_);
    for (int n = 0; n < gpus; ++n) {
      workers_.Add(std::make_unique<DeviceWorker>(
          DeviceWorkerDeps{*engines_[n], costs_[n], metrics_, clock_, n, &leases_,
                           [this, n](const absl::Status& status) {
                             EXPECT_TRUE(IsDeviceLost(status)) << status;
                             admission_->Fence(n);
                             leases_.LoseDevice(n);
                             ++lost_[n];
                           }},
          DeviceWorkerOptions{}));
    }
  }

  absl::StatusOr<AdmittedCall> Admit(const Problem& problem, uint64_t seed,
                                     absl::Duration time_left, uint64_t id, ReplySink& sink) {
    return Admit(DecodedCall(problem, Priority::kNormal, seed), seed, time_left, id, sink);
  }
  absl::StatusOr<AdmittedCall> Admit(AttentionCall call, uint64_t seed, absl::Duration time_left,
                                     uint64_t id, ReplySink& sink) {
    CallMemory memory;
    RETURN_IF_ERROR(leases_.FindFor(call, CallerOf(seed), memory));
    const absl::Time now = clock_.Now();
    return admission_->Admit(std::move(call),
                             {.id = id,
                              .caller = CallerOf(seed),
                              .deadline = now + time_left,
                              .received_at = now,
                              .sink = &sink},
                             std::move(memory));
  }
  static std::string CallerOf(uint64_t seed) { return seed % 2 == 0 ? "a" : "b"; }
  LeaseTable& leases() { return leases_; }
  void Submit(AdmittedCall call) { workers_.Submit(std::move(call)); }
  void Cancel(uint64_t id) { workers_.Cancel(id, StopCause::kCancelled); }
  StagingPool& staging() { return staging_; }
  int lost(int gpu) const { return lost_[gpu]; }
  // Answers carry their device number in no way; the engines know what they did.
  double kernel_seconds(int gpu) const { return engines_[gpu]->Use().kernel_seconds; }
  int64_t uploaded_bytes() const { return engines_.front()->Use().uploaded_bytes; }

  void ExpectAllGivenBack() const {
    EXPECT_EQ(admission_->Use().bytes, 0);
    EXPECT_EQ(admission_->Use().calls, 0);
    EXPECT_EQ(staging_.used(), 0);
    for (size_t n = 0; n < engines_.size(); ++n) {
      EXPECT_EQ(admission_->DeviceUse(static_cast<int>(n)).memory_bytes, 0);
      const DeviceUse use = engines_[n]->Use();
      EXPECT_EQ(use.input_bytes + use.output_bytes + use.workspace_bytes, 0) << "gpu " << n;
      EXPECT_EQ(use.lease_bytes, leases_.Use(static_cast<int>(n)).bytes) << "gpu " << n;
      EXPECT_EQ(use.lease_bytes, admission_->DeviceUse(static_cast<int>(n)).lease_bytes);
    }
  }

 private:
  static LeaseLimits Limits(int gpus) {
    return {.device_bytes = std::vector<int64_t>(gpus, int64_t{3} << 20),
            .min_hold = absl::ZeroDuration()};
  }

  RealClock clock_;
  Metrics metrics_;
  StagingPool staging_;
  std::vector<std::unique_ptr<cuda::CudaBackend>> engines_;
  std::deque<CostModel> costs_;
  LeaseTable leases_;  // what it holds goes before the engines
  std::unique_ptr<Admission> admission_;
  std::vector<std::atomic<int>> lost_;
  Workers workers_;  // last: gone before what it uses
};

bool IsRightAnswer(const Problem& p, uint64_t seed, const Result& result) {
  const ProblemInputs inputs = RandomInputs(p, seed);
  return std::memcmp(result.output(Tensor::kO), inputs.q.data(), inputs.q.size()) == 0;
}

struct Sent {
  Problem problem;
  uint64_t seed = 0;
  uint64_t id = 0;
  bool refused = false;
  KeptAnswer answer;
};

// One schedule of `count` calls. Whether a device may be lost is the caller's to say.
void RunSchedule(SimulatedServer& server, Random& random, int count, bool may_lose) {
  static uint64_t next_id = 1;
  std::deque<Sent> calls;
  for (int n = 0; n < count; ++n) {
    Sent& call = calls.emplace_back();
    call.problem = SimulatedProblem(random);
    call.seed = random.Bits() % 8 + 1;
    call.id = next_id++;
    const absl::Duration left =
        random.Chance(0.1) ? absl::Microseconds(random.Between(1, 2000)) : absl::Minutes(1);
    auto admitted = server.Admit(call.problem, call.seed, left, call.id, call.answer);
    call.refused = !admitted.ok();
    if (!call.refused) server.Submit(Landed(std::move(admitted), server.staging()));
    if (random.Chance(0.15)) server.Cancel(calls[random.Between(0, n)].id);
  }
  for (Sent& call : calls) {
    if (call.refused) continue;
    const absl::Status& status = call.answer.Wait();
    if (status.ok()) {
      EXPECT_TRUE(IsRightAnswer(call.problem, call.seed, call.answer.result()));
    } else {
      const bool lost = status.code() == absl::StatusCode::kUnavailable;
      EXPECT_TRUE(status.code() == absl::StatusCode::kCancelled ||
                  status.code() == absl::StatusCode::kDeadlineExceeded || (lost && may_lose))
          << status;
      if (lost) {
        EXPECT_EQ(ReasonOf(status), reason::kDeviceLost);
      }
    }
    EXPECT_EQ(call.answer.answers(), 1);
    call.answer.DropResult();
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSchedules = 100;  // each takes thirty times as long
#else
constexpr uint64_t kSchedules = 2000;
#endif

TEST(DeviceSimulation, AnswersEveryCallOfThousandsOfRandomSchedules) {
  FakeDriver fake;
  std::unique_ptr<SimulatedServer> server;
  for (uint64_t seed = 1; seed <= kSchedules; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    if (seed % 100 == 1) {  // now and then a server of another shape
      server.reset();
      server = std::make_unique<SimulatedServer>(fake, static_cast<int>(random.Between(1, 3)),
                                                 random.Chance(0.5) ? 0.05 : 1e-9);
    }
    fake.seed(seed);
    RunSchedule(*server, random, static_cast<int>(random.Between(1, 6)), /*may_lose=*/false);
    server->ExpectAllGivenBack();
    if (HasFailure()) return;
  }
}

// A backward on a residual; the stand-in's gradients are q, k and v.
AttentionCall DecodedBackward(const Problem& p, uint64_t seed, const std::string& token) {
  const ProblemInputs inputs = RandomInputs(p, seed);
  v1::BackwardRequest request;
  *request.mutable_problem() = MakeForward(p, seed).problem();
  request.set_d_o(inputs.d_o.data(), static_cast<size_t>(inputs.d_o.size()));
  request.set_residual_token(token);
  return DecodedRequest(request, Direction::kBackward);
}

bool AreRightGradients(const Problem& p, uint64_t seed, const Result& result) {
  const ProblemInputs in = RandomInputs(p, seed);
  auto same = [&](int tensor, const AlignedBytes& expected) {
    return std::memcmp(result.output(tensor), expected.data(), expected.size()) == 0;
  };
  return same(Tensor::kDQ, in.q) && same(Tensor::kDK, in.k) && same(Tensor::kDV, in.v);
}

struct Lease {
  Problem problem;
  uint64_t seed = 0;
  std::string token;
};

// Forward calls that are to be kept; those that were.
std::vector<Lease> Keep(SimulatedServer& server, Random& random, int count, uint64_t& next_id) {
  std::deque<Sent> calls;
  for (int n = 0; n < count; ++n) {
    Sent& call = calls.emplace_back();
    call.problem = SimulatedProblem(random);
    call.seed = random.Bits() % 8 + 1;
    v1::ForwardRequest request = MakeForward(call.problem, call.seed);
    request.mutable_options()->set_keep_residual(random.Chance(0.8));
    auto admitted = server.Admit(DecodedRequest(request, Direction::kForward), call.seed,
                                 absl::Minutes(1), next_id++, call.answer);
    call.refused = !admitted.ok();
    if (!call.refused) server.Submit(Landed(std::move(admitted), server.staging()));
  }
  std::vector<Lease> leases;
  for (Sent& call : calls) {
    if (call.refused || !call.answer.Wait().ok()) continue;
    EXPECT_TRUE(IsRightAnswer(call.problem, call.seed, call.answer.result()));
    const auto& grant = call.answer.result().lease();
    if (grant.has_value()) leases.push_back({call.problem, call.seed, grant->token});
    call.answer.DropResult();
  }
  return leases;
}

// Backward calls on them, some twice, some cancelled, some released or evicted while they run,
// beside other calls. How many were computed.
int RunBackwards(SimulatedServer& server, Random& random, const std::vector<Lease>& leases,
                 uint64_t& next_id) {
  std::deque<Sent> calls;
  for (const Lease& lease : leases) {
    const std::string owner = SimulatedServer::CallerOf(lease.seed);
    for (int n = random.Chance(0.2) ? 2 : 1; n > 0; --n) {
      AttentionCall backward = DecodedBackward(lease.problem, lease.seed, lease.token);
      Sent& call = calls.emplace_back();
      call.problem = lease.problem;
      call.seed = lease.seed;
      call.id = next_id++;
      auto admitted =
          server.Admit(std::move(backward), lease.seed, absl::Minutes(1), call.id, call.answer);
      call.refused = !admitted.ok();
      if (!call.refused) server.Submit(Landed(std::move(admitted), server.staging()));
    }
    if (random.Chance(0.3)) (void)server.leases().Release(lease.token, owner);
    if (random.Chance(0.1)) server.leases().EvictOne(0);
    if (random.Chance(0.1) && !calls.empty()) server.Cancel(calls.back().id);
  }
  int computed = 0;
  for (Sent& call : calls) {
    if (call.refused || !call.answer.Wait().ok()) continue;
    EXPECT_TRUE(AreRightGradients(call.problem, call.seed, call.answer.result()));
    call.answer.DropResult();
    ++computed;
  }
  return computed;
}

TEST(DeviceSimulation, RunsBackwardsOnResidualsOfHundredsOfRandomSchedules) {
  constexpr uint64_t kSteps = kSchedules / 8;  // most of a step makes and checks its tensors
  FakeDriver fake;
  std::unique_ptr<SimulatedServer> server;
  uint64_t next_id = 1;
  int computed = 0;
  for (uint64_t seed = 1; seed <= kSteps; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    if (seed % 100 == 1) {
      server.reset();
      server = std::make_unique<SimulatedServer>(fake, static_cast<int>(random.Between(1, 3)),
                                                 random.Chance(0.5) ? 0.05 : 1e-9);
    }
    fake.seed(seed);
    const int count = static_cast<int>(random.Between(1, 5));
    computed += RunBackwards(*server, random, Keep(*server, random, count, next_id), next_id);
    server->ExpectAllGivenBack();  // but for the leases that live on
    if (HasFailure()) return;
  }
  EXPECT_GT(computed, kSteps);
}

// With T bytes a tensor, a forward moves 3 T, a backward that brings everything 5 T, and one on a
// residual T; descriptors and tiles are little beside them.
void ExpectOneTensorOfFive(ElementType element) {
  FakeDriver fake;
  SimulatedServer server(fake, 1, 0.05);
  Random random(1);
  Problem p = SimulatedProblem(random);
  p.element = element;
  p.batch = 1;
  p.q_heads = p.kv_heads = 4;
  p.q_len = p.kv_len = 512;
  p.qk_head_dim = p.v_head_dim = 64;
  const double tensor = static_cast<double>(p.QueryElements()) * 2;
  uint64_t id = 1;
  auto upload_of = [&](AttentionCall call, KeptAnswer& answer) {
    const int64_t before = server.uploaded_bytes();
    server.Submit(
        Landed(server.Admit(std::move(call), 1, absl::Minutes(1), id++, answer), server.staging()));
    EXPECT_TRUE(answer.Wait().ok()) << answer.Wait();
    return static_cast<double>(server.uploaded_bytes() - before) / tensor;
  };
  v1::ForwardRequest forward = MakeForward(p, 1);
  forward.mutable_options()->set_keep_residual(true);
  KeptAnswer kept, leased, whole;
  EXPECT_NEAR(upload_of(DecodedRequest(forward, Direction::kForward), kept), 3, 0.1);
  ASSERT_TRUE(kept.result().lease().has_value());
  AttentionCall on_residual = DecodedBackward(p, 1, kept.result().lease()->token);
  EXPECT_NEAR(upload_of(std::move(on_residual), leased), 1, 0.1);
  v1::ForwardResponse reply;
  reply.set_o(forward.q());
  reply.set_lse(std::string(static_cast<size_t>(p.LseElements() * 4), '\0'));
  v1::BackwardRequest backward = MakeBackward(p, 1, reply);
  backward.clear_d_lse();
  EXPECT_NEAR(upload_of(DecodedRequest(backward, Direction::kBackward), whole), 5, 0.15);
}

TEST(DeviceSimulation, BringsOnlyTheOutputsGradientToTheGpuForABackwardOnAResidual) {
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    SCOPED_TRACE(ElementName(element));
    ExpectOneTensorOfFive(element);
  }
}

TEST(DeviceSimulation, LosesOneGpuAndItsLeases) {
  int computed = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FakeDriver fake;
    uint64_t next_id = 1;
    {
      SimulatedServer server(fake, 2, 0.05);
      Random random(seed);
      fake.seed(seed);
      fake.trap(static_cast<int>(seed % 2), static_cast<int>(random.Between(0, 12)));
      for (int round = 0; round < 4; ++round) {
        computed += RunBackwards(server, random, Keep(server, random, 6, next_id), next_id);
      }
      server.ExpectAllGivenBack();
      const int gpu = static_cast<int>(seed % 2);
      if (server.lost(gpu) > 0) {
        EXPECT_EQ(server.leases().Use(gpu).leases, 0);
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(computed, 100);
}

TEST(DeviceSimulation, LosesOneGpuAndGoesOnWithTheOther) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FakeDriver fake;
    {
      SimulatedServer server(fake, 2, 0.05);
      Random random(seed);
      fake.seed(seed);
      fake.trap(static_cast<int>(seed % 2), static_cast<int>(random.Between(0, 6)));
      RunSchedule(server, random, 30, /*may_lose=*/true);
      RunSchedule(server, random, 10, /*may_lose=*/true);
      server.ExpectAllGivenBack();
      EXPECT_EQ(server.lost(1 - static_cast<int>(seed % 2)), 0);
      EXPECT_LE(server.lost(static_cast<int>(seed % 2)), 1);
    }
    if (HasFailure()) return;
  }
}

// Counts calls that have been answered: they are right or cancelled, and only callers who cancel
// are.
struct StormCount {
  int computed = 0, cancelled = 0;

  void Take(Sent& call, bool may_be_cancelled) {
    const absl::Status& status = call.answer.Wait();
    if (status.ok()) {
      EXPECT_TRUE(IsRightAnswer(call.problem, call.seed, call.answer.result()));
      ++computed;
    } else {
      EXPECT_TRUE(may_be_cancelled && absl::IsCancelled(status)) << status;
      ++cancelled;
    }
    EXPECT_EQ(call.answer.answers(), 1);
    call.answer.DropResult();
  }
};

// Twenty storms of fifty cancels each, while calls wait, go up, compute in slices, come back, or
// are answered already. Once a storm's last answer is out nothing of it is left, and another
// caller's calls among them are computed as ever.
TEST(DeviceSimulation, GivesAllMemoryBackWhenAThousandCallsAreCancelledAtRandomPoints) {
  constexpr int kStorms = 20, kCalls = 60;  // every sixth is another caller's
  FakeDriver fake;
  SimulatedServer server(fake, 2, 1e-6);
  StormCount count;
  uint64_t next_id = 6000000;
  for (uint64_t seed = 1; seed <= kStorms; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    fake.seed(seed);
    std::deque<Sent> calls;
    std::vector<uint64_t> to_cancel;
    for (int n = 0; n < kCalls; ++n) {
      Sent& call = calls.emplace_back();
      call.problem = SimulatedProblem(random);
      call.id = next_id++;
      call.seed = n % 6 == 5 ? 2 : 1;
      server.Submit(
          Landed(server.Admit(call.problem, call.seed, absl::Minutes(1), call.id, call.answer),
                 server.staging()));
      if (call.seed == 1) to_cancel.push_back(call.id);
      if (to_cancel.empty() || random.Chance(0.3)) continue;
      const int64_t last = static_cast<int64_t>(to_cancel.size()) - 1;
      if (random.Chance(0.5)) std::swap(to_cancel[random.Between(0, last)], to_cancel.back());
      server.Cancel(to_cancel.back());
      to_cancel.pop_back();
    }
    for (uint64_t id : to_cancel) server.Cancel(id);
    for (Sent& call : calls) count.Take(call, call.seed == 1);
    server.ExpectAllGivenBack();  // at once: nothing is waited for
  }
  EXPECT_GE(count.computed, kStorms * kCalls / 6);
  EXPECT_GT(count.cancelled, 0);  // how many is the machine's to say
  RecordProperty("cancelled", count.cancelled);
}

// The cuda engine by itself, on a simulated GPU; after a FakeDriver.
cuda::CudaBackend EngineAlone() {
  auto device =
      cuda::MakeDriverDevice({.driver_library = FakeDriver::kLibrary, .memory_fraction = 0.0005});
  CHECK(device.ok()) << device.status();
  return cuda::CudaBackend(*std::move(device));
}

// Like calls that lie one after the other in staging memory, as they land, but come in any order.
TEST(DeviceSimulation, CopiesTheLikeCallsOfALaunchByOneCommandEachWay) {
  constexpr int kCalls = 8;
  FakeDriver fake;
  cuda::CudaBackend engine = EngineAlone();
  Random random(3);
  Problem p = SimulatedProblem(random);
  p.qk_head_dim = p.v_head_dim = 64;
  const ProblemInputs in = RandomInputs(p, 1);
  const int64_t input =
      AlignedSize(in.k.size()) + AlignedSize(in.v.size()) + AlignedSize(in.q.size());
  const int64_t lse = AlignedSize(p.LseElements() * 4);
  const int64_t stride = input + lse + AlignedSize(in.q.size());
  AlignedBytes memory(stride * kCalls);
  std::vector<ForwardCall> calls;
  for (int n : {5, 2, 7, 0, 1, 6, 3, 4}) {
    std::byte* at = memory.data() + n * stride;
    ForwardCall call{.problem = &p};
    auto place = [&](const AlignedBytes& tensor) {
      std::memcpy(at, tensor.data(), static_cast<size_t>(tensor.size()));
      return std::exchange(at, at + AlignedSize(tensor.size()));
    };
    call.k = place(in.k);
    call.v = place(in.v);
    call.q = place(in.q);
    call.lse = reinterpret_cast<float*>(at);
    call.o = at + lse;
    calls.push_back(call);
  }
  const int64_t up = fake.calls("cuMemcpyHtoDAsync"), down = fake.calls("cuMemcpyDtoHAsync");
  ASSERT_TRUE(engine.Forward(calls).ok());
  // k, v and q; lse and o, which are one block where lse's bytes fill its place.
  const int blocks = p.LseElements() % 16 == 0 ? 1 : 2;
  EXPECT_EQ(fake.calls("cuMemcpy2DAsync"), 1 + blocks);
  EXPECT_EQ(fake.calls("cuMemcpyHtoDAsync"), up + 1);  // descriptors and tiles
  EXPECT_EQ(fake.calls("cuMemcpyDtoHAsync"), down);
  for (const ForwardCall& call : calls) {
    EXPECT_EQ(std::memcmp(call.o, in.q.data(), static_cast<size_t>(in.q.size())), 0);
  }
}

// Kept calls' tensors lie each in memory of their own, across which the driver copies nothing.
TEST(DeviceSimulation, KeepsTheLikeCallsOfALaunchEachInItsOwnMemory) {
  constexpr int kCalls = 6;
  FakeDriver fake;
  cuda::CudaBackend engine = EngineAlone();
  Random random(3);
  Problem p = SimulatedProblem(random);
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    p.element = element;
    const ProblemInputs in = RandomInputs(p, 1);
    std::vector<AlignedBytes> outputs;
    std::vector<std::unique_ptr<DeviceResidual>> kept(kCalls);
    std::vector<ForwardCall> calls;
    auto place = [&](int64_t bytes) { return outputs.emplace_back(bytes).data(); };
    for (int n = 0; n < kCalls; ++n) {
      ForwardCall call{.problem = &p, .q = in.q.data(), .k = in.k.data(), .v = in.v.data()};
      call.lse = reinterpret_cast<float*>(place(p.LseElements() * 4));
      call.o = place(in.q.size());
      call.workspace = place(engine.WorkspaceBytes(p, Direction::kForward));
      if (n % 3 != 0) call.kept = &kept[n];
      calls.push_back(call);
    }
    const auto report = engine.Forward(calls);
    ASSERT_TRUE(report.ok()) << report.status();
    for (int n = 0; n < kCalls; ++n) EXPECT_EQ(kept[n] != nullptr, n % 3 != 0);
  }
}

TEST(DeviceSimulation, SpreadsCallsThatWaitOverAllGpus) {
  FakeDriver fake;
  SimulatedServer server(fake, 2, 0.05);
  Random random(7);
  std::deque<Sent> calls;
  std::deque<AdmittedCall> waiting;
  int on_second = 0;
  for (int n = 0; n < 40; ++n) {
    Sent& call = calls.emplace_back();
    call.problem = SimulatedProblem(random);
    auto admitted = server.Admit(call.problem, 1, absl::Minutes(1), 1000000 + n, call.answer);
    ASSERT_TRUE(admitted.ok()) << admitted.status();
    on_second += admitted->device();
    ASSERT_TRUE(TakePlaces(*admitted, server.staging()).ok());
    waiting.push_back(Landed(std::move(admitted), server.staging()));
  }
  for (AdmittedCall& call : waiting) server.Submit(std::move(call));
  for (Sent& call : calls) EXPECT_TRUE(call.answer.Wait().ok()) << call.answer.Wait();
  EXPECT_GE(on_second, 10);
  EXPECT_LE(on_second, 30);
  EXPECT_GT(server.kernel_seconds(0), 0);
  EXPECT_GT(server.kernel_seconds(1), 0);
}

}  // namespace
}  // namespace attnd
