// Masks by description at the daemon: what CompileMask and GetServerInfo say of them, and that one
// which takes long to compile delays nobody else, unary or streamed.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "proto/attnd/v1/problem_codec.h"
#include "tests/daemon/masked_request.h"
#include "tests/daemon/streamed_request.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

grpc::Status CompileAt(Daemon& daemon, const Problem& p, v1::CompileMaskResponse& reply) {
  v1::CompileMaskRequest request;
  *request.mutable_problem() = EncodeProblem(p);
  grpc::ClientContext context;
  return daemon.stub().CompileMask(&context, request, &reply);
}

// With no tensors: refused once its mask has been compiled.
v1::ForwardRequest SlowForward(int64_t seed) {
  v1::ForwardRequest request;
  *request.mutable_problem() = EncodeProblem(SlowMask(seed));
  return request;
}

TEST(DaemonMask, CompileMaskSaysHowEachDeviceRunsIt) {
  std::vector<Device> engines;
  engines.push_back(MakeCpuBackend({.threads = 1}));
  engines.push_back(std::make_unique<ReferenceBackend>());
  engines.push_back(std::make_unique<GatedBackend>());  // does not tell
  Daemon daemon(std::move(engines), TestOptions());
  const Problem p = WithMask(SmallProblem(200, 2), "window(63,0)");
  v1::CompileMaskResponse reply;
  const grpc::Status status = CompileAt(daemon, p, reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.id().size(), 32);
  EXPECT_EQ(reply.visible(), 2 * (64 * 200 - 64 * 63 / 2));
  EXPECT_EQ(reply.empty_rows(), 0);
  ASSERT_EQ(reply.device_size(), 3);
  const v1::MaskOnDevice& cpu = reply.device(0);
  EXPECT_EQ(cpu.device(), "cpu0");
  EXPECT_EQ(cpu.kernel_forward(), "cpu_forward_float32_listed");
  EXPECT_EQ(cpu.kernel_backward(), "cpu_backward_float32_listed");
  EXPECT_FALSE(cpu.reason().empty());
  EXPECT_EQ(cpu.tiles(), 2 * 4 * 4);
  EXPECT_EQ(cpu.tiles_full(), 0);
  EXPECT_EQ(cpu.tiles_partial(), 2 * 7);
  EXPECT_GT(cpu.distinct_bitmaps(), 0);
  EXPECT_GT(cpu.plan_bytes(), 0);
  EXPECT_GT(cpu.compile_nanoseconds(), 0);
  EXPECT_EQ(cpu.tile_rows(), 64);
  EXPECT_EQ(cpu.tile_keys(), 64);
  EXPECT_EQ(reply.device(1).kernel_forward(), "reference_forward_f64");
  EXPECT_EQ(reply.device(2).kernel_forward(), "");
  EXPECT_TRUE(absl::StrContains(reply.device(2).reason(), "does not tell"));
}

TEST(DaemonMask, TheReportNamesTheKernelOfTheReceipt) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const Problem p = WithMask(SmallProblem(100, 2), "longformer(8,4)");
  v1::CompileMaskResponse report;
  ASSERT_TRUE(CompileAt(daemon, p, report).ok());
  grpc::ClientContext forward, backward;
  v1::ForwardResponse reply;
  ASSERT_TRUE(daemon.stub().Forward(&forward, MakeForward(p, 1), &reply).ok());
  EXPECT_EQ(reply.receipt().kernel(), report.device(0).kernel_forward());
  const v1::BackwardRequest request = MakeBackward(p, 1, reply);
  v1::BackwardResponse gradients;
  ASSERT_TRUE(daemon.stub().Backward(&backward, request, &gradients).ok());
  EXPECT_EQ(gradients.receipt().kernel(), report.device(0).kernel_backward());
}

TEST(DaemonMask, CompileMaskRefusesAProblemWithoutOne) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  v1::CompileMaskResponse reply;
  const grpc::Status status = CompileAt(daemon, SmallProblem(), reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "problem.mask: expected a mask, got none");
}

TEST(DaemonMask, ServerInfoNamesMasksWhereEveryEngineHasThem) {
  const auto has_masks = [](Daemon& daemon) {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    EXPECT_TRUE(daemon.stub().GetServerInfo(&context, {}, &info).ok());
    return std::count(info.feature().begin(), info.feature().end(), "masks") == 1;
  };
  Daemon cpu(MakeCpuBackend({.threads = 1}));
  EXPECT_TRUE(has_masks(cpu));
}

// The time of a call, and how many small calls of others began and ended meanwhile.
struct Beside {
  int64_t small_calls = 0;
  grpc::Status status;
};
template <class Slow>
Beside SmallCallsBeside(Daemon& daemon, const Slow& slow) {
  const Problem small = SmallProblem(8, 1);
  const v1::ForwardRequest request = MakeForward(small, 1);
  auto stub = daemon.NewStub();
  const auto call = [&] {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    const grpc::Status status = stub->Forward(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
  };
  call();  // connected
  Beside beside;
  std::atomic<bool> done{false};
  std::thread thread([&] {
    beside.status = slow();
    done = true;
  });
  while (!done) {
    call();
    if (!done) ++beside.small_calls;
  }
  thread.join();
  return beside;
}

// A few of the hundreds that take place; on the thread that receives calls there would be one.
constexpr int64_t kUndelayed = 20;

TEST(DaemonMask, ASlowMaskOfAUnaryCallDelaysNobodyElse) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const v1::ForwardRequest request = SlowForward(1);
  const Beside beside = SmallCallsBeside(daemon, [&] {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    return daemon.stub().Forward(&context, request, &reply);
  });
  EXPECT_EQ(beside.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StrContains(beside.status.error_message(), "k: expected"))
      << beside.status.error_message();
  EXPECT_GT(beside.small_calls, kUndelayed);
}

TEST(DaemonMask, SlowMasksOfCompileMaskDelayNobodyElse) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const Beside beside = SmallCallsBeside(daemon, [&] {
    std::vector<std::thread> others;
    for (int64_t n = 2; n < 6; ++n) {
      others.emplace_back([&daemon, n] {
        v1::CompileMaskResponse reply;
        EXPECT_TRUE(CompileAt(daemon, SlowMask(n), reply).ok());
      });
    }
    for (std::thread& other : others) other.join();
    return grpc::Status::OK;
  });
  EXPECT_GT(beside.small_calls, kUndelayed);
}

// Each stream's header takes long; gRPC's threads go on with small streams.
TEST(DaemonMask, SlowMasksOfStreamsDelayNobodyElse) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const auto half_close_after = [&](const Problem& p) {
    v1::ForwardStreamRequest header;
    *header.mutable_header()->mutable_problem() = EncodeProblem(p);
    grpc::ClientContext context;
    auto stream = daemon.stub().ForwardStream(&context);
    stream->Write(header);
    stream->WritesDone();
    return stream->Finish();
  };
  const Beside beside = SmallCallsBeside(daemon, [&] {
    std::vector<std::thread> others;
    for (int64_t n = 10; n < 14; ++n) {
      others.emplace_back([&, n] {
        EXPECT_EQ(half_close_after(SlowMask(n)).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
      });
    }
    for (std::thread& other : others) other.join();
    return grpc::Status::OK;
  });
  EXPECT_GT(beside.small_calls, kUndelayed);
}

TEST(DaemonMask, AStreamWithAMaskGivesTheUnaryCallsBits) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const Problem p = WithMask(SmallProblem(100, 2), "bigbird(8,4,1,16)");
  v1::ForwardRequest request = MakeForward(p, 1);
  v1::ForwardStreamRequest header;
  v1::ForwardRequest whole = request;
  const auto payloads = TakePayloads(request);
  *header.mutable_header() = request;
  grpc::ClientContext context;
  auto stream = daemon.stub().ForwardStream(&context);
  stream->Write(header);
  for (const auto& [tensor, bytes] : payloads) stream->Write(ForwardChunk(tensor, 0, bytes));
  stream->WritesDone();
  std::string o;
  for (v1::ForwardStreamResponse reply; stream->Read(&reply);) {
    if (reply.chunk().tensor() == v1::ForwardResponse::kOFieldNumber) o += reply.chunk().data();
  }
  ASSERT_TRUE(stream->Finish().ok());
  grpc::ClientContext unary;
  v1::ForwardResponse reply;
  ASSERT_TRUE(daemon.stub().Forward(&unary, whole, &reply).ok());
  EXPECT_EQ(o, reply.o());
}

// Both of a connection's: the second never begins, and leaves nothing in the cache.
TEST(DaemonMask, CompileMaskOfACallerThatLeftIsNotBegun) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  std::thread first([&daemon] {
    v1::CompileMaskResponse reply;
    EXPECT_TRUE(CompileAt(daemon, SlowMask(50), reply).ok());
  });
  while (daemon.server().masks().masks == 0) std::this_thread::yield();  // it compiles
  v1::CompileMaskRequest request;
  *request.mutable_problem() = EncodeProblem(SlowMask(51));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
  v1::CompileMaskResponse reply;
  EXPECT_EQ(daemon.stub().CompileMask(&context, request, &reply).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  first.join();
  v1::CompileMaskResponse third;  // its turn comes after the second's
  EXPECT_TRUE(CompileAt(daemon, WithMask(SmallProblem(), "causal"), third).ok());
  EXPECT_EQ(daemon.server().masks().masks, 2);
}

TEST(DaemonMask, CallersLeaveWhileTheirMaskIsCompiled) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  for (int64_t n = 20; n < 26; ++n) {
    grpc::ClientContext unary, streamed;
    v1::ForwardStreamRequest header;
    *header.mutable_header() = SlowForward(n);
    auto stream = daemon.stub().ForwardStream(&streamed);
    stream->Write(header);
    unary.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
    v1::ForwardResponse reply;
    EXPECT_EQ(daemon.stub().Forward(&unary, SlowForward(n + 100), &reply).error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
    streamed.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  EXPECT_TRUE(daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  EXPECT_EQ(daemon.server().use().calls, 0);
}

}  // namespace
}  // namespace attnd
