#include <grpc/support/log.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "client/attention_client.h"
#include "client/c/attnd_client.h"
#include "client/c/call.h"
#include "client/c/capture.h"
#include "client/c/conversions.h"
#include "client/c/handles.h"
#include "client/c/mask.h"
#include "client/call/client_core.h"

// Since it has no GPR_ASSERT gRPC logs with abseil.
#ifndef GPR_ASSERT
#include "absl/log/globals.h"
#endif

struct attnd_residual {
  attnd::Residual residual;
};
struct attnd_memory {
  std::shared_ptr<std::byte> memory;  // and calls that use it
};

namespace attnd {
namespace {

absl::Status RunForward(attnd_client& client, const Problem& problem,
                        const attnd_forward_tensors& tensors, attnd_call& call) {
  ForwardTensors in{tensors.q, tensors.k, tensors.v, tensors.mask_bits, tensors.bias};
  Residual residual;
  CallOptions options = call.MakeCallOptions();
  if (tensors.capture != nullptr) {
    ASSIGN_OR_RETURN(options.capture, ToCaptureOptions(*tensors.capture));
  }
  auto receipt = client.client->Forward(problem, in, {tensors.o, tensors.lse}, options,
                                        tensors.keep == nullptr ? nullptr : &residual);
  if (tensors.keep != nullptr) {
    bool kept = residual.bytes_held() > 0;
    *tensors.keep = kept ? new attnd_residual{std::move(residual)} : nullptr;
  }
  if (!receipt.ok()) return receipt.status();
  if (receipt->captured.has_value()) {
    RETURN_IF_ERROR(GivePooled(problem, *tensors.capture, *receipt->captured));
  }
  call.SetResult([r = *std::move(receipt)] { return ReceiptJson(r); });
  return absl::OkStatus();
}

absl::Status RunBackward(attnd_client& client, const Problem& problem,
                         const attnd_backward_tensors& t, attnd_call& call) {
  BackwardTensors in{t.q, t.k, t.v, t.mask_bits, t.bias, t.o, t.lse, t.d_o, t.d_lse};
  BackwardOutputs out{t.d_q, t.d_k, t.d_v, t.d_bias, t.d_sink};
  const Residual* residual = t.residual == nullptr ? nullptr : &t.residual->residual;
  auto receipt = client.client->Backward(problem, in, out, call.MakeCallOptions(), residual);
  if (receipt.ok()) call.SetResult([r = *receipt] { return ReceiptJson(r); });
  return receipt.status();
}

absl::Status NewClient(const attnd_client_options& options,
                       std::unique_ptr<AttentionClient>& client) {
  ASSIGN_OR_RETURN(client, AttentionClient::Connect(ToClientOptions(options)));
  return absl::OkStatus();
}

absl::Status RunServerInfo(attnd_client& client, int index, attnd_call& call) {
  ASSIGN_OR_RETURN(ServerInfo info, client.client->GetServerInfo(index, call.MakeCallOptions()));
  call.SetResult([info] { return ServerInfoJson(info); });
  return absl::OkStatus();
}

absl::Status RunCompileMask(attnd_client& client, int index, const Problem& problem,
                            attnd_call& call) {
  ASSIGN_OR_RETURN(MaskReport report,
                   client.client->CompileMask(problem, index, call.MakeCallOptions()));
  call.SetResult([report] { return MaskReportJson(report); });
  return absl::OkStatus();
}

absl::Status RunHealth(attnd_client& client, int index, attnd_call& call, int32_t& health) {
  ASSIGN_OR_RETURN(Health answer, client.client->CheckHealth(index, call.MakeCallOptions()));
  health = answer == Health::kServing;
  return absl::OkStatus();
}

// Debian's abseil runs its deadlock detector in every lock, which doubles a small call's time, and
// its global lock must not be held by another thread when a process forks.
[[maybe_unused]] const bool kNoDeadlockDetector = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();

// gRPC writes what it thinks of a peer to stderr, which belongs to the program that we are part of.
// The error that a call ends with says it too. GRPC_VERBOSITY, where set, brings it back.
[[maybe_unused]] const bool kQuiet = [] {
  if (std::getenv("GRPC_VERBOSITY") != nullptr) return true;
#ifdef GPR_ASSERT
  gpr_set_log_function([](gpr_log_func_args*) {});
#else
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfinity);
#endif
  return true;
}();

}  // namespace
}  // namespace attnd

using attnd::FullStructure;
using attnd::Problem;
using attnd::ToProblem;

int attnd_abi_version(void) { return ATTND_ABI_VERSION; }

const char* attnd_version(void) {
  static const std::string* version = new std::string(attnd::VersionString());
  return version->c_str();
}

attnd_call* attnd_call_new(const char* request_id, double timeout_seconds, int32_t priority) {
  return new attnd_call(request_id == nullptr ? "" : request_id, timeout_seconds, priority);
}

void attnd_call_free(attnd_call* call) { delete call; }
void attnd_call_cancel(attnd_call* call) { call->Cancel(); }
void attnd_call_set_poll_hook(attnd_call* call, int (*hook)(void* argument), void* argument) {
  call->SetPollHook(hook, argument);
}
void attnd_call_set_traceparent(attnd_call* call, const char* traceparent) {
  call->SetTraceparent(traceparent);
}
void attnd_call_get_progress(const attnd_call* call, attnd_progress* progress) {
  *progress = call->GetProgress();
}
int attnd_call_code(const attnd_call* call) { return call->code(); }
const char* attnd_call_message(const attnd_call* call) { return call->message(); }
const char* attnd_call_detail_json(const attnd_call* call) { return call->detail_json(); }
const char* attnd_call_result_json(attnd_call* call) { return call->result_json(); }

attnd_client* attnd_client_new(const attnd_client_options* options, attnd_call* call) {
  attnd_client_options full = FullStructure(*options);
  auto client = std::make_unique<attnd_client>();
  int code = call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("options", *options));
    return attnd::NewClient(full, client->client);
  });
  return code == ATTND_OK ? client.release() : nullptr;
}

void attnd_client_free(attnd_client* client) { delete client; }

void attnd_client_get_counters(const attnd_client* client, attnd_counters* counters) {
  const attnd::ClientCounters& now = client->client->core().counters;
  const attnd_counters full = {.struct_size = counters->struct_size,
                               .calls = now.calls,
                               .failed_calls = now.failed_calls,
                               .retries = now.retries,
                               .failovers = now.failovers,
                               .leases_lost = now.leases_lost,
                               .replays = now.replays,
                               .seconds_waiting = static_cast<double>(now.waiting_ns) * 1e-9};
  std::memcpy(counters, &full, std::min(counters->struct_size, sizeof(full)));
}

attnd_memory* attnd_memory_new(attnd_client* client, int64_t bytes) {
  auto memory = client->client->Allocate(bytes);
  return memory.ok() ? new attnd_memory{*std::move(memory)} : nullptr;
}

void* attnd_memory_data(const attnd_memory* memory) { return memory->memory.get(); }
void attnd_memory_free(attnd_memory* memory) { delete memory; }

int attnd_forward(attnd_client* client, const attnd_problem* problem,
                  const attnd_forward_tensors* tensors, attnd_call* call) {
  attnd_forward_tensors full = FullStructure(*tensors);
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("problem", *problem));
    RETURN_IF_ERROR(attnd::CheckHasSize("tensors", *tensors));
    return attnd::RunForward(*client, ToProblem(*problem), full, *call);
  });
}

int attnd_backward(attnd_client* client, const attnd_problem* problem,
                   const attnd_backward_tensors* tensors, attnd_call* call) {
  attnd_backward_tensors full = FullStructure(*tensors);
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("problem", *problem));
    RETURN_IF_ERROR(attnd::CheckHasSize("tensors", *tensors));
    return attnd::RunBackward(*client, ToProblem(*problem), full, *call);
  });
}

attnd_mask* attnd_mask_new(const void* spec, int64_t spec_bytes, int64_t batch, int64_t q_heads,
                           int64_t rows, int64_t keys, attnd_call* call) {
  auto mask = std::make_unique<attnd_mask>();
  const attnd::MaskCall sizes = {.batch = batch, .q_heads = q_heads, .rows = rows, .keys = keys};
  int code = call->Run([&] { return attnd::MakeMask(spec, spec_bytes, sizes, *mask); });
  return code == ATTND_OK ? mask.release() : nullptr;
}

void attnd_mask_free(attnd_mask* mask) { delete mask; }
const uint8_t* attnd_mask_id(const attnd_mask* mask) { return mask->mask->id().data(); }

int attnd_compile_mask(attnd_client* client, int32_t address_index, const attnd_problem* problem,
                       attnd_call* call) {
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("problem", *problem));
    return attnd::RunCompileMask(*client, address_index, ToProblem(*problem), *call);
  });
}

void attnd_residual_free(attnd_residual* residual) { delete residual; }
int64_t attnd_residual_bytes(const attnd_residual* residual) {
  return residual == nullptr ? 0 : residual->residual.bytes_held();
}

int attnd_build_pattern(attnd_client* client, const void* request, int64_t request_bytes,
                        const char* token, attnd_call* call) {
  return call->Run([&] {
    return attnd::RunBuildPattern(
        client, {static_cast<const char*>(request), static_cast<size_t>(request_bytes)},
        token == nullptr ? "" : token, *call);
  });
}

int attnd_release_capture(attnd_client* client, const char* token, attnd_call* call) {
  return call->Run([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const attnd::KeptAttentionMap kept, attnd::ToKeptMap("token", token));
    return client->client->ReleaseCapture(kept, call->MakeCallOptions());
  });
}

int attnd_server_info(attnd_client* client, int32_t address_index, attnd_call* call) {
  return call->Run([&] { return attnd::RunServerInfo(*client, address_index, *call); });
}

int attnd_check_health(attnd_client* client, int32_t address_index, int32_t* health,
                       attnd_call* call) {
  return call->Run([&] { return attnd::RunHealth(*client, address_index, *call, *health); });
}
