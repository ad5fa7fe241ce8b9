// attnd_local: attention within this process, by an engine of kernels/.
#include <cstddef>
#include <cstdlib>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "attention/mask_plans.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "client/c/attnd_client.h"
#include "client/c/call.h"
#include "client/c/conversions.h"
#include "client/call/poll_hook.h"
#include "client/types/error_detail.h"
#include "client/types/tensors.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"

struct attnd_local {
  std::shared_ptr<attnd::MaskPlans> plans;
  std::unique_ptr<attnd::Backend> engine;
};

namespace attnd {
namespace {

struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Workspace = std::unique_ptr<std::byte, FreeBytes>;

absl::StatusOr<Workspace> AllocateWorkspace(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  const int64_t whole = (bytes / kAlignment + 1) * kAlignment;
  Workspace workspace(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(whole))));
  if (workspace != nullptr) return workspace;
  return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
}

// INVALID_ARGUMENT with reason EMPTY_ROW, as a server says it, for a row that sees no key where the
// mask rejects such rows.
absl::Status CheckRows(const Problem& problem, MaskPlans& plans) {
  if (problem.mask == nullptr || problem.mask->spec().empty_row != EmptyRow::kReject) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const auto plan, plans.Get(problem, HostMaskOptions()));
  absl::Status status = CheckEmptyRows(*plan, problem);
  if (!absl::IsInvalidArgument(status)) return status;
  return WithReason(std::move(status), "EMPTY_ROW", {{"field", "problem.mask.empty_row"}});
}

// launch() on another thread while this one, which may have signals to handle, asks the call's
// hook; on this one where there is no hook. CANCELLED where the call's stop token was set.
template <class Launch>
absl::StatusOr<LaunchReport> Watch(const CallOptions& options, const Launch& launch) {
  absl::StatusOr<LaunchReport> report;
  if (options.poll_hook == nullptr) {
    report = launch();
  } else {
    PollHook hook(options.poll_hook);
    std::future<absl::StatusOr<LaunchReport>> done = std::async(std::launch::async, launch);
    const auto interval = absl::ToChronoMilliseconds(PollHook::kInterval);
    while (done.wait_for(interval) != std::future_status::ready) hook.Poll();
    report = done.get();
  }
  if (options.stop.stop_requested()) return absl::CancelledError("the call was cancelled");
  return report;
}

// The receipt of a launch that began then.
CallReceipt ReceiptOf(const Backend& engine, const Problem& problem, const LaunchReport& report,
                      absl::Time start) {
  CallReceipt receipt;
  receipt.backend = "local";
  receipt.device = engine.info().device;
  receipt.kernel = report.kernel;
  receipt.accumulate = report.accumulate;
  receipt.dropout_p_effective = problem.dropout.threshold / 256.0;
  receipt.deterministic = report.deterministic;
  receipt.elapsed = SteadyNow() - start;
  return receipt;
}

// Runs launch(call) for a call of the engine whose tensors are set.
template <class EngineCall, class Launch>
absl::Status RunLocally(attnd_local& local, const Problem& problem, Direction direction,
                        EngineCall engine_call, attnd_call& call, const Launch& launch) {
  const absl::Time start = SteadyNow();
  RETURN_IF_ERROR(local.engine->Supports(problem, direction));
  RETURN_IF_ERROR(CheckRows(problem, *local.plans));
  const CallOptions options = call.MakeCallOptions();
  ASSIGN_OR_RETURN(const Workspace workspace,
                   AllocateWorkspace(local.engine->WorkspaceBytes(problem, direction)));
  engine_call.problem = &problem;
  engine_call.workspace = workspace.get();
  engine_call.stop = options.stop;
  ASSIGN_OR_RETURN(const LaunchReport report,
                   Watch(options, [&] { return launch(absl::MakeConstSpan(&engine_call, 1)); }));
  call.SetResult([receipt = ReceiptOf(*local.engine, problem, report, start)] {
    return ReceiptJson(receipt);
  });
  return absl::OkStatus();
}

absl::Status RunLocalForward(attnd_local& local, const Problem& problem,
                             const attnd_forward_tensors& t, attnd_call& call) {
  if (t.capture != nullptr || t.keep != nullptr) {
    return absl::InvalidArgumentError(
        "tensors: expected neither capture nor keep, which are servers', got one");
  }
  const ForwardTensors in = {t.q, t.k, t.v, t.mask_bits, t.bias};
  RETURN_IF_ERROR(Validate(problem));
  RETURN_IF_ERROR(CheckTensors(problem, in, ForwardOutputs{t.o, t.lse}));
  std::vector<float> lse(t.lse == nullptr ? static_cast<size_t>(problem.LseElements()) : 0);
  ForwardCall engine_call;
  engine_call.q = t.q;
  engine_call.k = t.k;
  engine_call.v = t.v;
  engine_call.mask_bits = t.mask_bits;
  engine_call.bias = t.bias;
  engine_call.o = t.o;
  engine_call.lse = t.lse == nullptr ? lse.data() : t.lse;
  return RunLocally(local, problem, Direction::kForward, std::move(engine_call), call,
                    [&](auto calls) { return local.engine->Forward(calls); });
}

absl::Status RunLocalBackward(attnd_local& local, const Problem& problem,
                              const attnd_backward_tensors& t, attnd_call& call) {
  const BackwardTensors in = {t.q, t.k, t.v, t.mask_bits, t.bias, t.o, t.lse, t.d_o, t.d_lse};
  RETURN_IF_ERROR(Validate(problem));
  RETURN_IF_ERROR(
      CheckTensors(problem, in, BackwardOutputs{t.d_q, t.d_k, t.d_v, t.d_bias, t.d_sink}));
  BackwardCall engine_call;
  engine_call.q = t.q;
  engine_call.k = t.k;
  engine_call.v = t.v;
  engine_call.mask_bits = t.mask_bits;
  engine_call.bias = t.bias;
  engine_call.o = t.o;
  engine_call.lse = t.lse;
  engine_call.d_o = t.d_o;
  engine_call.d_lse = t.d_lse;
  engine_call.d_q = t.d_q;
  engine_call.d_k = t.d_k;
  engine_call.d_v = t.d_v;
  engine_call.d_bias = t.d_bias;
  engine_call.d_sink = t.d_sink;
  return RunLocally(local, problem, Direction::kBackward, engine_call, call,
                    [&](auto calls) { return local.engine->Backward(calls); });
}

}  // namespace
}  // namespace attnd

attnd_local* attnd_local_new(int32_t threads, int32_t float64) {
  auto local = std::make_unique<attnd_local>();
  local->plans = std::make_shared<attnd::MaskPlans>();
  if (float64 != 0) {
    local->engine = std::make_unique<attnd::ReferenceBackend>();
  } else {
    local->engine = attnd::MakeCpuBackend({.threads = threads, .mask_plans = local->plans});
  }
  return local.release();
}

void attnd_local_free(attnd_local* local) { delete local; }

int attnd_local_forward(attnd_local* local, const attnd_problem* problem,
                        const attnd_forward_tensors* tensors, attnd_call* call) {
  attnd_forward_tensors full = attnd::FullStructure(*tensors);
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("problem", *problem));
    RETURN_IF_ERROR(attnd::CheckHasSize("tensors", *tensors));
    return attnd::RunLocalForward(*local, attnd::ToProblem(*problem), full, *call);
  });
}

int attnd_local_backward(attnd_local* local, const attnd_problem* problem,
                         const attnd_backward_tensors* tensors, attnd_call* call) {
  attnd_backward_tensors full = attnd::FullStructure(*tensors);
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("problem", *problem));
    RETURN_IF_ERROR(attnd::CheckHasSize("tensors", *tensors));
    return attnd::RunLocalBackward(*local, attnd::ToProblem(*problem), full, *call);
  });
}
