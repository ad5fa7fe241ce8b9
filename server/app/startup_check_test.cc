#include "server/app/startup_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "absl/strings/match.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"

namespace attnd {
namespace {

// The reference engine with one tensor spoilt, or with fewer element types.
class SpoiltBackend final : public Backend {
 public:
  enum class Spoil { kNothing, kO, kLse, kDQ, kDK, kDV, kNanInO, kSupportsNothing, kOnlyHalf };
  explicit SpoiltBackend(Spoil spoil) : spoil_(spoil) {}

  const BackendInfo& info() const override { return right_.info(); }
  absl::Status Supports(const Problem& problem, Direction) const override {
    bool half = problem.element == ElementType::kFloat16;
    bool refuse = spoil_ == Spoil::kSupportsNothing || (spoil_ == Spoil::kOnlyHalf && !half);
    return refuse ? absl::UnimplementedError("no") : absl::OkStatus();
  }
  int64_t WorkspaceBytes(const Problem&, Direction) const override { return 100; }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    auto report = right_.Forward(calls);
    const ForwardCall& call = calls.front();
    if (spoil_ == Spoil::kO) Add(call.problem->element, call.o, 0.5f);
    if (spoil_ == Spoil::kNanInO) Add(call.problem->element, call.o, NAN);
    if (spoil_ == Spoil::kLse) Add(ElementType::kFloat32, call.lse, 0.5f);
    return report;
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    auto report = right_.Backward(calls);
    const BackwardCall& call = calls.front();
    if (spoil_ == Spoil::kDQ) Add(call.problem->element, call.d_q, 0.5f);
    if (spoil_ == Spoil::kDK) Add(call.problem->element, call.d_k, 0.5f);
    if (spoil_ == Spoil::kDV) Add(call.problem->element, call.d_v, 0.5f);
    return report;
  }

 private:
  static void Add(ElementType element, void* data, float error) {
    StoreElement(element, data, 50, LoadElement(element, data, 50) + error);
  }
  const Spoil spoil_;
  ReferenceBackend right_;
};

using Spoil = SpoiltBackend::Spoil;

TEST(StartupCheck, PassesForRightEngines) {
  for (Spoil spoil : {Spoil::kNothing, Spoil::kOnlyHalf}) {
    SpoiltBackend backend(spoil);
    CostModel cost(1e9);
    EXPECT_TRUE(StartupCheck(backend, cost).ok()) << StartupCheck(backend, cost);
  }
  std::unique_ptr<Backend> cpu = MakeCpuBackend({});
  CostModel cost(1e9);
  EXPECT_TRUE(StartupCheck(*cpu, cost).ok()) << StartupCheck(*cpu, cost);
  Problem any;
  any.element = ElementType::kFloat32;
  EXPECT_NE(cost.FlopsPerSecond(any, Direction::kForward), 1e9);
}

TEST(StartupCheck, NamesTheTensorThatIsWrong) {
  struct Case {
    Spoil spoil;
    const char* message;
  };
  for (const Case& one :
       {Case{Spoil::kO, "self test: o is wrong: element 50"},
        Case{Spoil::kNanInO, "self test: o is wrong"}, Case{Spoil::kLse, "self test: lse is wrong"},
        Case{Spoil::kDQ, "self test: d_q is wrong"}, Case{Spoil::kDK, "self test: d_k is wrong"},
        Case{Spoil::kDV, "self test: d_v is wrong"},
        Case{Spoil::kSupportsNothing, "self test: the engine supports no element type"}}) {
    SpoiltBackend backend(one.spoil);
    CostModel cost(1e9);
    absl::Status status = StartupCheck(backend, cost);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(absl::StrContains(status.message(), one.message)) << status;
  }
}

}  // namespace
}  // namespace attnd
