// Tensors in memory that a caller on the same host shares with the daemon: the same bytes as over
// the socket; and what a hostile caller can try with it: refused, the daemon goes on, and nothing
// stays behind.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/shared_memory_caller.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/gated_daemon.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

ServerOptions UnixOptions() {
  ServerOptions options = TestOptions();
  options.listen = {UniqueName("unix:/tmp/attnd_shm_")};
  return options;
}

std::string ControlPath(const Daemon& daemon) { return daemon.address().substr(5) + ".shm"; }

int OpenDescriptors() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

// Waits until another thread's work on the server shows.
template <class Condition>
bool Eventually(const Condition& condition) {
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (!condition() && absl::Now() < until) std::this_thread::yield();
  return condition();
}

template <class Request>
void MoveOperands(Request& request, SharedLayout& layout) {
  if (request.problem().has_bool_mask()) {
    layout.AddInput(v1::TENSOR_NAME_MASK_BITS, request.mutable_mask_bits());
  }
  if (request.problem().has_bias()) {
    layout.AddInput(v1::TENSOR_NAME_BIAS, request.mutable_bias());
  }
  layout.AddInput(v1::TENSOR_NAME_K, request.mutable_k());
  layout.AddInput(v1::TENSOR_NAME_V, request.mutable_v());
  layout.AddInput(v1::TENSOR_NAME_Q, request.mutable_q());
}

void MoveInputs(v1::ForwardRequest& request, SharedLayout& layout) {
  MoveOperands(request, layout);
}

void MoveInputs(v1::BackwardRequest& request, SharedLayout& layout) {
  MoveOperands(request, layout);
  layout.AddInput(v1::TENSOR_NAME_LSE, request.mutable_lse());
  layout.AddInput(v1::TENSOR_NAME_O, request.mutable_o());
  layout.AddInput(v1::TENSOR_NAME_D_O, request.mutable_d_o());
  layout.AddInput(v1::TENSOR_NAME_D_LSE, request.mutable_d_lse());
}

// A caller with one region and the daemon it shares it with.
class SharedCaller {
 public:
  explicit SharedCaller(Daemon& daemon, int64_t bytes = kMiB)
      : daemon_(daemon), region_(bytes), control_(ControlPath(daemon)) {
    v1::SharedMemoryReply reply = control_.Add(region_);
    CHECK(reply.error().empty()) << reply.error();
    CHECK(reply.proof() == region_.proof());
    token_ = reply.region();
  }

  TestRegion& region() { return region_; }
  ControlSocket& control() { return control_; }
  const std::string& token() const { return token_; }
  uint64_t NextUse() { return ++use_; }

  // A forward whose inputs and outputs lie in the region.
  v1::ForwardRequest Request(const Problem& problem, uint64_t seed) {
    v1::ForwardRequest request = MakeForward(problem, seed);
    SharedLayout layout(region_, token_, NextUse());
    MoveInputs(request, layout);
    layout.AddOutput(v1::TENSOR_NAME_LSE, problem.LseElements() * 4);
    layout.AddOutput(v1::TENSOR_NAME_O, problem.OutputElements() * ElementBytes(problem.element));
    *request.mutable_shared_memory() = layout.memory();
    return request;
  }
  grpc::Status Forward(const v1::ForwardRequest& request) {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    return daemon_.stub().Forward(&context, request, &reply);
  }

 private:
  Daemon& daemon_;
  TestRegion region_;
  ControlSocket control_;
  std::string token_;
  uint64_t use_ = 0;
};

void ExpectSharedCallWorks(Daemon& daemon) {
  SharedCaller caller(daemon);
  grpc::Status status = caller.Forward(caller.Request(SmallProblem(), 1));
  EXPECT_TRUE(status.ok()) << status.error_message();
}

class SharedMemoryPath : public testing::Test {
 protected:
  void CheckForward(const Problem& problem, uint64_t seed) {
    v1::ForwardRequest request = MakeForward(problem, seed);
    v1::ForwardResponse expected = ComputeForward(*engine_, problem, request);
    SharedLayout layout(caller_.region(), caller_.token(), caller_.NextUse());
    MoveInputs(request, layout);
    layout.AddOutput(v1::TENSOR_NAME_O, expected.o().size());
    layout.AddOutput(v1::TENSOR_NAME_LSE, expected.lse().size());
    *request.mutable_shared_memory() = layout.memory();
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    grpc::Status status = daemon_.stub().Forward(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(reply.o().empty() && reply.lse().empty());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_O), expected.o());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_LSE), expected.lse());
    EXPECT_TRUE(layout.GapsAreUntouched());
    CheckBackward(problem, seed, expected);
  }

  void CheckBackward(const Problem& problem, uint64_t seed, const v1::ForwardResponse& forward) {
    v1::BackwardRequest request = MakeBackward(problem, seed, forward);
    v1::BackwardResponse expected = ComputeBackward(*engine_, problem, request);
    SharedLayout layout(caller_.region(), caller_.token(), caller_.NextUse());
    MoveInputs(request, layout);
    layout.AddOutput(v1::TENSOR_NAME_D_K, expected.d_k().size());
    layout.AddOutput(v1::TENSOR_NAME_D_V, expected.d_v().size());
    layout.AddOutput(v1::TENSOR_NAME_D_Q, expected.d_q().size());
    if (!expected.d_bias().empty()) {
      layout.AddOutput(v1::TENSOR_NAME_D_BIAS, expected.d_bias().size());
    }
    *request.mutable_shared_memory() = layout.memory();
    v1::BackwardResponse reply;
    grpc::ClientContext context;
    grpc::Status status = daemon_.stub().Backward(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_K), expected.d_k());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_V), expected.d_v());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_Q), expected.d_q());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_BIAS), expected.d_bias());
    // Tensors that stay in the message come back in it, as ever.
    EXPECT_EQ(reply.d_sink(), expected.d_sink());
    EXPECT_TRUE(layout.GapsAreUntouched());
  }

  const std::unique_ptr<Backend> engine_ = MakeCpuBackend({.threads = 2});
  Daemon daemon_{MakeCpuBackend({.threads = 2}), UnixOptions()};
  SharedCaller caller_{daemon_, 16 * kMiB};
};

TEST_F(SharedMemoryPath, GivesTheEnginesBytesAndTouchesNoOtherForAnyProblem) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 64});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    CheckForward(problem, seed);
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_EQ(daemon_.server().staging_used(), 0);
}

TEST_F(SharedMemoryPath, TakesNoStagingMemoryForTensorsThatLieThere) {
  Problem problem = SmallProblem(1024, 8);  // 256 KiB a tensor; the limit below is less
  ServerOptions options = UnixOptions();
  options.transport.max_message_bytes = 256 << 10;
  Daemon small(std::make_unique<ReferenceBackend>(), options);
  SharedCaller caller(small, 4 * kMiB);
  problem.causal = true;
  problem.window_left = 4;
  problem.window_right = -1;
  grpc::Status status = caller.Forward(caller.Request(problem, 3));
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// A forward that is to be kept and its backward, by a caller who writes over his tensors between.
class KeptCall {
 public:
  KeptCall(Backend& engine, const Problem& problem)
      : engine_(engine),
        problem_(problem),
        forward_(MakeForward(problem, 5)),
        expected_(ComputeForward(engine, problem, forward_)) {
    forward_.mutable_options()->set_keep_residual(true);
  }

  // The residual's token; empty: nothing was kept.
  std::string Forward(Daemon& daemon, SharedCaller& caller, bool outputs_too) {
    v1::ForwardRequest request = forward_;
    SharedLayout layout(caller.region(), caller.token(), caller.NextUse());
    MoveInputs(request, layout);
    if (outputs_too) {
      layout.AddOutput(v1::TENSOR_NAME_O, expected_.o().size());
      layout.AddOutput(v1::TENSOR_NAME_LSE, expected_.lse().size());
    }
    *request.mutable_shared_memory() = layout.memory();
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    grpc::Status status = daemon.stub().Forward(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(outputs_too ? layout.Read(v1::TENSOR_NAME_O) : reply.o(), expected_.o());
    EXPECT_EQ(outputs_too ? layout.Read(v1::TENSOR_NAME_LSE) : reply.lse(), expected_.lse());
    EXPECT_EQ(reply.o().empty(), outputs_too);
    EXPECT_TRUE(layout.GapsAreUntouched());
    memset(caller.region().data(), 0x7f, caller.region().size());  // his memory, his again
    return reply.residual().token();
  }
  // With an empty token all tensors are sent.
  void ExpectGradients(Daemon& daemon, SharedCaller& caller, const std::string& token) {
    v1::BackwardRequest request = MakeBackward(problem_, 5, expected_);
    const v1::BackwardResponse expected = ComputeBackward(engine_, problem_, request);
    SharedLayout layout(caller.region(), caller.token(), caller.NextUse());
    if (token.empty()) {
      MoveInputs(request, layout);
    } else {
      for (std::string* kept : {request.mutable_q(), request.mutable_k(), request.mutable_v(),
                                request.mutable_o(), request.mutable_lse()}) {
        kept->clear();
      }
      request.set_residual_token(token);
      layout.AddInput(v1::TENSOR_NAME_D_O, request.mutable_d_o());
    }
    layout.AddOutput(v1::TENSOR_NAME_D_Q, expected.d_q().size());
    layout.AddOutput(v1::TENSOR_NAME_D_K, expected.d_k().size());
    layout.AddOutput(v1::TENSOR_NAME_D_V, expected.d_v().size());
    *request.mutable_shared_memory() = layout.memory();
    v1::BackwardResponse reply;
    grpc::ClientContext context;
    grpc::Status status = daemon.stub().Backward(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_Q), expected.d_q());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_K), expected.d_k());
    EXPECT_EQ(layout.Read(v1::TENSOR_NAME_D_V), expected.d_v());
  }
  int64_t tensor_bytes() const { return expected_.o().size(); }  // of q, k, v and o alike

 private:
  Backend& engine_;
  const Problem problem_;
  v1::ForwardRequest forward_;
  const v1::ForwardResponse expected_;
};

TEST_F(SharedMemoryPath, CopiesWhatIsKeptInHostMemory) {
  KeptCall call(*engine_, SmallProblem(24, 2));
  for (bool outputs_too : {false, true}) {
    const std::string token = call.Forward(daemon_, caller_, outputs_too);
    ASSERT_FALSE(token.empty());
    EXPECT_GE(daemon_.server().staging_used(), 4 * call.tensor_bytes());
    call.ExpectGradients(daemon_, caller_, token);
  }
}

// A daemon whose staging memory holds one tensor, not two, and whose engine keeps on a device.
class KeptOnDevice : public testing::Test {
 protected:
  static constexpr int64_t kTensor = 128 << 10;

  KeptOnDevice() {
    auto gpu = std::make_unique<GatedBackend>();
    gpu->SetDeviceBytes(4 * kMiB, 64 * kMiB);
    gpu->KeepResiduals(kMiB);
    gpu_ = gpu.get();
    ServerOptions options = WithMetrics(UnixOptions());
    options.admission.memory_bytes = options.admission.caller_max_bytes = kTensor * 3 / 2;
    daemon_ = std::make_unique<Daemon>(std::move(gpu), options);
    caller_ = std::make_unique<SharedCaller>(*daemon_, 2 * kMiB);
  }

  double Count(const char* name) { return Counts(*daemon_).Of(name, {}); }

  GatedBackend* gpu_;  // the daemon's
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<SharedCaller> caller_;
  ReferenceBackend engine_;
  KeptCall call_{engine_, SmallProblem(kTensor / 4 / 8 / 16, 16)};
};

TEST_F(KeptOnDevice, ReadsAndWritesInPlace) {
  ASSERT_EQ(call_.tensor_bytes(), kTensor);
  const int before = static_cast<int>(gpu_->launches().size());  // the self test's
  gpu_->Close();
  std::string token;
  std::thread forward([&] { token = call_.Forward(*daemon_, *caller_, true); });
  gpu_->WaitForLaunches(before + 1);
  EXPECT_EQ(daemon_->server().staging_used(), 0);
  EXPECT_EQ(daemon_->server().use().bytes, 0);
  gpu_->Open();
  forward.join();
  ASSERT_FALSE(token.empty());
  EXPECT_EQ(gpu_->held_bytes(), kMiB);
  EXPECT_EQ(Count("attnd_host_copy_bytes_total"), 0);
  call_.ExpectGradients(*daemon_, *caller_, token);
  EXPECT_EQ(daemon_->server().leases(0).bytes, kMiB);
  EXPECT_EQ(daemon_->server().use().lease_bytes, 0);  // of host memory
}

TEST_F(KeptOnDevice, SendsOutputsThatLieElsewhere) {
  const std::string token = call_.Forward(*daemon_, *caller_, false);
  ASSERT_FALSE(token.empty());
  EXPECT_EQ(Count("attnd_host_copy_bytes_total"), 0);
  call_.ExpectGradients(*daemon_, *caller_, token);
}

TEST_F(KeptOnDevice, KeepsNothingWithoutRoomThere) {
  gpu_->HoldNothing();
  EXPECT_EQ(call_.Forward(*daemon_, *caller_, true), "");
  EXPECT_EQ(Count("attnd_leases_refused_total"), 1);
  EXPECT_EQ(daemon_->server().leases().leases, 0);
  EXPECT_EQ(daemon_->server().use().lease_bytes, 0);
  EXPECT_EQ(daemon_->server().staging_used(), 0);
  call_.ExpectGradients(*daemon_, *caller_, "");
}

// They lie in staging memory anyway.
TEST_F(KeptOnDevice, KeepsTensorsOfAMessageInHostMemoryWithoutRoomThere) {
  gpu_->HoldNothing();
  const Problem small = SmallProblem();
  v1::ForwardRequest request = MakeForward(small, 1);
  request.mutable_options()->set_keep_residual(true);
  v1::ForwardResponse reply;
  grpc::ClientContext context;
  ASSERT_TRUE(daemon_->stub().Forward(&context, request, &reply).ok());
  EXPECT_TRUE(reply.has_residual());
  EXPECT_GT(daemon_->server().use().lease_bytes, 0);
}

TEST_F(KeptOnDevice, TellsCallersThatOutputsMayLieInTheRegion) {
  EXPECT_TRUE(caller_->control().Add(TestRegion(kMiB)).kept_outputs());
  Daemon other(MakeCpuBackend({.threads = 2}), UnixOptions());
  SharedCaller caller(other);
  EXPECT_FALSE(caller.control().Add(TestRegion(kMiB)).kept_outputs());
}

// A request that is wrong about shared memory is told what is wrong.
TEST_F(SharedMemoryPath, RefusesPlacesThatAreWrongNamingTheField) {
  struct Case {
    const char* name;
    const char* field;
    std::function<void(v1::ForwardRequest&)> spoil;
  };
  using Request = v1::ForwardRequest;
  auto place = [](Request& r, int n) { return r.mutable_shared_memory()->mutable_tensor(n); };
  constexpr uint64_t kTop = uint64_t{1} << 63;
  const Case cases[] = {
      {"behind the end", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 0)->set_offset(16 * kMiB); }},
      {"the last byte behind the end", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 0)->set_offset(16 * kMiB - 64); }},
      {"an offset that wraps", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 0)->set_offset(~uint64_t{63}); }},
      {"a negative offset", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 4)->set_offset(static_cast<uint64_t>(-4096)); }},
      {"an offset of 2^63", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 0)->set_offset(kTop); }},
      {"not aligned", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 0)->set_offset(place(r, 0)->offset() + 32); }},
      {"a size that is too large", "k", [&](Request& r) { place(r, 0)->set_size(1 << 20); }},
      {"a size that wraps", "k", [&](Request& r) { place(r, 0)->set_size(~uint64_t{0}); }},
      {"no size", "q", [&](Request& r) { place(r, 2)->set_size(0); }},
      {"an output's size", "o", [&](Request& r) { place(r, 4)->set_size(8); }},
      {"a region that is not listed", "shared_memory.tensor.region",
       [&](Request& r) { place(r, 0)->set_region(1); }},
      {"no region", "shared_memory.region",
       [&](Request& r) { r.mutable_shared_memory()->clear_region(); }},
      {"too many regions", "shared_memory.region",
       [&](Request& r) {
         for (int n = 0; n < 14; ++n) r.mutable_shared_memory()->add_region(caller_.token());
       }},
      {"no name", "shared_memory.tensor.name",
       [&](Request& r) { place(r, 0)->set_name(v1::TENSOR_NAME_UNSPECIFIED); }},
      {"an unknown name", "shared_memory.tensor.name",
       [&](Request& r) { place(r, 0)->set_name(static_cast<v1::TensorName>(99)); }},
      {"a name of modules", "k", [&](Request& r) { place(r, 0)->set_name(v1::TENSOR_NAME_X); }},
      {"a tensor twice", "shared_memory.tensor",
       [&](Request& r) { *r.mutable_shared_memory()->add_tensor() = *place(r, 0); }},
      {"a tensor of another call", "shared_memory.tensor",
       [&](Request& r) { place(r, 4)->set_name(v1::TENSOR_NAME_D_Q); }},
      {"an output that is not wanted", "shared_memory.tensor",
       [&](Request& r) { r.set_want_lse(false); }},
      {"a payload beside it", "k", [&](Request& r) { r.set_k("1234"); }},
      {"o over q", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 4)->set_offset(place(r, 2)->offset()); }},
      {"o over the end of q", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 4)->set_offset(place(r, 2)->offset() + 64); }},
      {"o over lse", "shared_memory.tensor.offset",
       [&](Request& r) { place(r, 4)->set_offset(place(r, 3)->offset()); }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    v1::ForwardRequest request = caller_.Request(SmallProblem(), 1);
    c.spoil(request);
    grpc::Status status = caller_.Forward(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_EQ(ErrorInfoOf(status).metadata().at("field"), c.field) << status.error_message();
  }
  EXPECT_TRUE(caller_.Forward(caller_.Request(SmallProblem(), 1)).ok());
}

TEST_F(SharedMemoryPath, LetsInputsShareBytes) {
  v1::ForwardRequest request = caller_.Request(SmallProblem(), 1);
  auto& tensors = *request.mutable_shared_memory()->mutable_tensor();
  tensors[0].set_offset(tensors[2].offset());
  tensors[1].set_offset(tensors[2].offset());
  EXPECT_TRUE(caller_.Forward(request).ok());
}

void ExpectUnknownRegion(const grpc::Status& status) {
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_EQ(ErrorInfoOf(status).reason(), "REGION_UNKNOWN");
}

TEST_F(SharedMemoryPath, KnowsNoTokenThatItHasNotGivenToThisConnection) {
  for (const std::string& token : {std::string(), std::string(16, '\0'), caller_.token().substr(1),
                                   caller_.token() + "x", std::string(4000, 'a')}) {
    v1::ForwardRequest request = caller_.Request(SmallProblem(), 1);
    request.mutable_shared_memory()->set_region(0, token);
    ExpectUnknownRegion(caller_.Forward(request));
  }
  SharedCaller other(daemon_);
  v1::ForwardRequest request = caller_.Request(SmallProblem(), 1);
  request.mutable_shared_memory()->add_region(other.token());
  ExpectUnknownRegion(caller_.Forward(request));
}

TEST_F(SharedMemoryPath, ForgetsRegionsWithTheirConnection) {
  v1::ForwardRequest request;
  {
    SharedCaller gone(daemon_);
    request = gone.Request(SmallProblem(), 1);
    EXPECT_TRUE(gone.Forward(request).ok());
  }
  ASSERT_TRUE(Eventually([&] { return daemon_.server().shared_memory_use().regions == 1; }));
  EXPECT_EQ(daemon_.server().shared_memory_use().bytes, 16 * kMiB);
  request.mutable_shared_memory()->set_use(99);
  ExpectUnknownRegion(caller_.Forward(request));
}

TEST(DaemonSharedMemory, ServesNoCallsOverTcp) {
  ServerOptions options = UnixOptions();
  options.listen.push_back("127.0.0.1:0");
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  SharedCaller caller(daemon);
  auto channel =
      grpc::CreateChannel(daemon.server().addresses()[1], grpc::InsecureChannelCredentials());
  auto stub = v1::Attention::NewStub(channel);
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  ExpectUnknownRegion(stub->Forward(&context, caller.Request(SmallProblem(), 1), &reply));
}

TEST(DaemonSharedMemory, ServesARegionToItsOwnerOnly) {
  ServerOptions options = UnixOptions();
  options.token_file = absl::StrCat(testing::TempDir(), "/tokens_", getpid());
  options.listen.push_back("127.0.0.1:0");
  std::ofstream(options.token_file) << "alice alice-alice-alice\nbob bob-bob-bob-bob-bob\n";
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  TestRegion region(kMiB), strange(kMiB);
  ControlSocket control(ControlPath(daemon));
  EXPECT_FALSE(control.Add(strange).error().empty());
  EXPECT_FALSE(control.Add(strange, "Bearer nobody-nobody-nobody").error().empty());
  v1::SharedMemoryReply reply = control.Add(region, "Bearer alice-alice-alice");
  ASSERT_TRUE(reply.error().empty()) << reply.error();
  auto over_tcp = v1::Attention::NewStub(
      grpc::CreateChannel(daemon.server().addresses()[1], grpc::InsecureChannelCredentials()));
  auto call = [&](v1::Attention::Stub& stub, const std::string& token, uint64_t use) {
    v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
    SharedLayout layout(region, reply.region(), use);
    MoveInputs(request, layout);
    *request.mutable_shared_memory() = layout.memory();
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + token);
    v1::ForwardResponse response;
    return stub.Forward(&context, request, &response);
  };
  ExpectUnknownRegion(call(daemon.stub(), "bob-bob-bob-bob-bob", 1));
  ExpectUnknownRegion(call(*over_tcp, "alice-alice-alice", 2));
  EXPECT_TRUE(call(daemon.stub(), "alice-alice-alice", 3).ok());
}

TEST(DaemonSharedMemory, HasNoSocketWhereItIsTurnedOff) {
  ServerOptions options = UnixOptions();
  options.shared_memory.enabled = false;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  EXPECT_FALSE(std::filesystem::exists(ControlPath(daemon)));
}

TEST(DaemonSharedMemory, RemovesItsSocketAtTheEnd) {
  std::string path;
  {
    Daemon daemon(std::make_unique<ReferenceBackend>(), UnixOptions());
    path = ControlPath(daemon);
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(DaemonSharedMemory, LeavesTheSocketOfADaemonThatTookItsPlace) {
  const ServerOptions options = UnixOptions();
  auto first = std::make_unique<Daemon>(std::make_unique<ReferenceBackend>(), options);
  std::filesystem::remove(options.listen.front().substr(5));  // as one does that stops to listen
  Daemon second(std::make_unique<ReferenceBackend>(), options);
  first.reset();
  TestRegion region(kMiB);
  ControlSocket control(ControlPath(second));
  EXPECT_EQ(control.Add(region).error(), "");
}

// A daemon whose kernels wait at a gate.
class GatedSharedDaemon : public testing::Test {
 protected:
  GatedDaemon gated_{UnixOptions()};
  Daemon& daemon_ = *gated_.daemon;
  GatedBackend* gate_ = gated_.engine;
  std::unique_ptr<SharedCaller> caller_ = std::make_unique<SharedCaller>(daemon_);
};

TEST_F(GatedSharedDaemon, FinishesACallWhoseRegionIsClosedInMidCall) {
  gate_->Close();
  v1::ForwardRequest request = caller_->Request(SmallProblem(), 1);
  grpc::Status status;
  std::thread call([&] { status = caller_->Forward(request); });
  gated_.WaitForLaunches(1);
  const int registrations = gate_->host_registrations();
  shutdown(caller_->control().fd(), SHUT_RDWR);
  v1::SharedMemoryReply reply;
  ASSERT_FALSE(caller_->control().Receive(reply));
  // The probe is refused either way: for its field while the daemon still knows the region.
  v1::ForwardRequest probe = caller_->Request(SmallProblem(), 1);
  probe.mutable_shared_memory()->mutable_tensor(0)->set_offset(kMiB);
  ASSERT_TRUE(Eventually(
      [&] { return ErrorInfoOf(caller_->Forward(probe)).reason() == "REGION_UNKNOWN"; }));
  EXPECT_EQ(daemon_.server().shared_memory_use().regions, 1);  // the call's
  gate_->Open();
  call.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Eventually([&] { return daemon_.server().shared_memory_use().bytes == 0; }));
  EXPECT_EQ(gate_->host_registrations(), registrations - 1);
}

TEST_F(GatedSharedDaemon, TellsWhenACancelledCallHasLetGo) {
  gate_->Close();
  v1::ForwardRequest request = caller_->Request(SmallProblem(), 1);
  grpc::Status status;
  std::thread call([&] { status = caller_->Forward(request); });
  gated_.WaitForLaunches(1);
  ASSERT_TRUE(caller_->control().AskEndOf(request.shared_memory().use()));
  // A later question about a use that does not run is answered first.
  ASSERT_TRUE(caller_->control().AskEndOf(caller_->NextUse()));
  v1::SharedMemoryReply reply;
  ASSERT_TRUE(caller_->control().Receive(reply));
  EXPECT_NE(reply.ended_use(), request.shared_memory().use());
  gate_->Open();
  ASSERT_TRUE(caller_->control().Receive(reply));
  EXPECT_EQ(reply.ended_use(), request.shared_memory().use());
  call.join();
  EXPECT_TRUE(status.ok());
}

TEST_F(GatedSharedDaemon, RefusesACallThatComesAfterItsEnd) {
  v1::ForwardRequest request = caller_->Request(SmallProblem(), 1);
  ASSERT_TRUE(caller_->control().AskEndOf(request.shared_memory().use()));
  v1::SharedMemoryReply reply;
  ASSERT_TRUE(caller_->control().Receive(reply));
  ExpectUnknownRegion(caller_->Forward(request));
}

TEST_F(GatedSharedDaemon, SurvivesACallerThatScribblesOverItsTensorsInMidCall) {
  v1::ForwardRequest request = caller_->Request(SmallProblem(64, 4), 1);
  std::atomic<bool> stop{false};
  std::thread scribbler([&] {
    Random random(1);
    uint64_t* words = reinterpret_cast<uint64_t*>(caller_->region().data());
    while (!stop) words[random.Between(512, kMiB / 8 - 1)] = random.Bits();
  });
  for (int n = 0; n < 20; ++n) {
    request.mutable_shared_memory()->set_use(caller_->NextUse());
    EXPECT_TRUE(caller_->Forward(request).ok());
  }
  stop = true;
  scribbler.join();
}

// Sends over a control connection what should not be sent.
class HostileControl : public testing::Test {
 protected:
  v1::SharedMemoryRequest AddRequest(const TestRegion& region) {
    v1::SharedMemoryRequest request;
    request.mutable_add_region()->set_size(region.size());
    request.mutable_add_region()->set_proof(std::string(region.proof()));
    return request;
  }
  void ExpectClosed(ControlSocket& control) {
    v1::SharedMemoryReply reply;
    EXPECT_FALSE(control.Receive(reply)) << reply.DebugString();
  }
  void ExpectBaseline() {
    ExpectSharedCallWorks(daemon_);
    EXPECT_TRUE(Eventually([&] { return daemon_.server().shared_memory_use().bytes == 0; }));
    EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors_; }))
        << OpenDescriptors() << " descriptors instead of " << descriptors_;
  }
  void SetUp() override {
    ExpectSharedCallWorks(daemon_);
    Eventually([&] { return daemon_.server().shared_memory_use().bytes == 0; });
    descriptors_ = OpenDescriptors();
  }

  Daemon daemon_{std::make_unique<ReferenceBackend>(), UnixOptions()};
  int descriptors_ = 0;
};

TEST_F(HostileControl, ClosesConnectionsThatSendWhatCannotBeRead) {
  TestRegion region(kMiB);
  {
    ControlSocket control(ControlPath(daemon_));
    SendPacket(control.fd(), "not a message \xff\xff", -1, true);
    ExpectClosed(control);
  }
  {
    ControlSocket control(ControlPath(daemon_));
    SendPacket(control.fd(), std::string(kMaxPacketBytes + 1, '\n'), -1, true);
    ExpectClosed(control);
  }
  {
    ControlSocket control(ControlPath(daemon_));
    SendPacket(control.fd(), std::string("\x20\x01", 2), -1, true);  // no kind
    ExpectClosed(control);
  }
  {
    ControlSocket control(ControlPath(daemon_));
    control.Send(AddRequest(region));  // no descriptor
    ExpectClosed(control);
  }
  {
    ControlSocket control(ControlPath(daemon_));
    v1::SharedMemoryRequest request;
    request.mutable_end_use()->set_use(1);
    control.Send(request, region.fd());
    ExpectClosed(control);
  }
}

TEST_F(HostileControl, TakesOneDescriptorAPacketAndClosesTheRest) {
  TestRegion region(kMiB);
  for (int count : {2, 4, 250}) {
    SCOPED_TRACE(count);
    ControlSocket control(ControlPath(daemon_));
    std::string bytes = AddRequest(region).SerializeAsString();
    std::vector<int> descriptors(count, region.fd());
    iovec part = {bytes.data(), bytes.size()};
    std::vector<char> space(CMSG_SPACE(count * sizeof(int)));
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space.data();
    message.msg_controllen = space.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(header), descriptors.data(), count * sizeof(int));
    ASSERT_GT(sendmsg(control.fd(), &message, 0), 0);
    ExpectClosed(control);
  }
  descriptors_ += 1;  // `region`
  ExpectBaseline();
}

TEST_F(HostileControl, RefusesWrongFilesSizesAndProofsAndGoesOn) {
  {
    TestRegion region(kMiB);
    ControlSocket control(ControlPath(daemon_));
    v1::SharedMemoryReply reply;
    auto refused = [&](const v1::SharedMemoryRequest& request, int fd) {
      return control.Send(request, fd) && control.Receive(reply) && !reply.error().empty() &&
             reply.region().empty();
    };
    v1::SharedMemoryRequest good = AddRequest(region), request = good;
    int pipes[2];
    ASSERT_EQ(pipe(pipes), 0);
    EXPECT_TRUE(refused(good, pipes[0]));
    EXPECT_TRUE(refused(good, STDERR_FILENO));
    close(pipes[0]);
    close(pipes[1]);
    for (uint64_t size : {uint64_t{0}, uint64_t{4096}, uint64_t{2} << 20, uint64_t{1} << 46,
                          uint64_t{1} << 63, ~uint64_t{0}}) {
      request.mutable_add_region()->set_size(size);
      EXPECT_TRUE(refused(request, region.fd())) << size;
    }
    EXPECT_TRUE(control.Add(region).error().empty());
    TestRegion second(kMiB);
    request = AddRequest(second);
    request.mutable_add_region()->set_proof("0123456789abcdeX");
    EXPECT_TRUE(refused(request, second.fd()));
    EXPECT_FALSE(control.Add(region).error().empty());  // sealed by the first time
    EXPECT_EQ(daemon_.server().shared_memory_use().regions, 1);
  }
  ExpectBaseline();
}

TEST_F(HostileControl, SurvivesRandomPackets) {
  {
    TestRegion region(kMiB);
    v1::SharedMemoryRequest end;
    end.mutable_end_use()->set_use(7);
    const std::string packets[] = {AddRequest(region).SerializeAsString(), end.SerializeAsString()};
    Random random(9);
    auto below = [&](size_t size) {
      return static_cast<size_t>(random.Between(0, static_cast<int64_t>(size) - 1));
    };
    for (int n = 0; n < 300; ++n) {
      SCOPED_TRACE(n);
      ControlSocket control(ControlPath(daemon_));
      for (int packet = 0; packet < 4; ++packet) {
        std::string bytes = packets[below(2)];
        for (int64_t flips = random.Between(0, 3); flips > 0; --flips) {
          bytes[below(bytes.size())] = static_cast<char>(random.Bits());
        }
        if (random.Chance(0.2)) bytes.resize(1 + below(bytes.size()));
        SendPacket(control.fd(), bytes, random.Chance(0.5) ? region.fd() : -1, false);
      }
    }
  }
  ExpectBaseline();
}

TEST_F(HostileControl, StopsAtTheNumberOfRegionsOfAConnection) {
  {
    ControlSocket control(ControlPath(daemon_));
    int taken = 0;
    std::vector<std::unique_ptr<TestRegion>> regions;
    for (int n = 0; n < SharedMemoryTable::kMaxRegionsOfSession + 3; ++n) {
      regions.push_back(std::make_unique<TestRegion>(8192));
      taken += control.Add(*regions.back()).error().empty();
    }
    EXPECT_EQ(taken, SharedMemoryTable::kMaxRegionsOfSession);
  }
  ExpectBaseline();
}

TEST(DaemonSharedMemory, StopsAtItsLimitOfBytesAndTakesThemAgainWhenSomeAreGone) {
  for (int64_t SharedMemoryLimits::*limit :
       {&SharedMemoryLimits::max_bytes, &SharedMemoryLimits::user_max_bytes}) {
    ServerOptions options = UnixOptions();
    options.shared_memory.*limit = 3 * kMiB;
    Daemon daemon(std::make_unique<ReferenceBackend>(), options);
    auto first = std::make_unique<SharedCaller>(daemon, 2 * kMiB);
    TestRegion region(2 * kMiB);
    ControlSocket control(ControlPath(daemon));
    EXPECT_NE(control.Add(region).error(), "");
    first.reset();
    ASSERT_TRUE(Eventually([&] { return daemon.server().shared_memory_use().bytes == 0; }));
    TestRegion again(2 * kMiB);
    EXPECT_EQ(control.Add(again).error(), "");
  }
}

TEST(DaemonSharedMemory, HoldsSilentConnectionsToItsLimit) {
  ServerOptions options = UnixOptions();
  options.shared_memory.max_connections = 8;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  std::vector<std::unique_ptr<ControlSocket>> silent;
  for (int n = 0; n < 8; ++n) {
    silent.push_back(std::make_unique<ControlSocket>(ControlPath(daemon)));
  }
  ControlSocket one_more(ControlPath(daemon));
  v1::SharedMemoryReply reply;
  EXPECT_FALSE(one_more.Receive(reply));
  TestRegion of_another(kMiB);  // for the others are still there
  EXPECT_EQ(silent.front()->Add(of_another).error(), "");
  silent.clear();
  ASSERT_TRUE(Eventually([&] {
    ControlSocket control(ControlPath(daemon));
    TestRegion region(kMiB);
    v1::SharedMemoryRequest request;
    request.mutable_add_region()->set_size(region.size());
    request.mutable_add_region()->set_proof(std::string(region.proof()));
    return control.Send(request, region.fd()) && control.Receive(reply) && reply.error().empty();
  }));
}

TEST_F(HostileControl, LosesNothingToCallersThatDieInMidCall) {
  for (int n = 0; n < 5; ++n) {
    pid_t child = fork();
    if (child == 0) {  // a caller that shares memory and is killed
      TestRegion region(kMiB);
      ControlSocket control(ControlPath(daemon_));
      control.Add(region);
      raise(SIGKILL);
    }
    int status;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
  }
  ExpectBaseline();
}

}  // namespace
}  // namespace attnd
