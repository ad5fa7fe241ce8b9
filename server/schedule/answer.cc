#include "server/schedule/answer.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/admission/residual.h"
#include "server/admission/staging_copy.h"

namespace attnd {
namespace {

LeaseWish WishOf(const AttentionCall& call, const std::string& caller) {
  LeaseWish wish{.owner = caller, .request = "", .ttl = call.residual_ttl()};
  const Shard& shard = call.problem().shard;
  if (!call.request_id().empty()) {  // which all shards of a logical call share
    wish.request =
        absl::StrCat(call.request_id(), "/", shard.batch_offset, "/", shard.q_head_offset);
  }
  return wish;
}

bool AnyInPlace(const AdmittedCall& call) {
  return absl::c_any_of(call.call().tensors(),
                        [&](const TensorSpec& tensor) { return call.InPlace(tensor); });
}

}  // namespace

Result Answer::Of(const DeviceWorkerDeps& deps, LaunchedCall& launched, const LaunchReport& report,
                  int batched_with) {
  AdmittedCall& call = launched.call;
  const bool in_place = AnyInPlace(call);
  if (call.call().shared_request() != nullptr) deps.metrics.HostCopied(LandOutputs(call));
  call.DropMemory();
  Result result(std::move(call.call()));
  result.report_ = report;
  result.times_ = launched.times;
  result.batched_with_ = batched_with;
  result.captured_ = std::move(launched.captured);
  result.outputs_.Reserve(result.call().tensors().size());
  for (const TensorSpec& tensor : result.call().tensors()) {
    if (tensor.role == TensorUse::kOutput) result.outputs_.Add(tensor.id, call.staged()[tensor.id]);
  }
  const bool keep = result.call().keep_residual() && deps.leases != nullptr;
  if (keep && launched.kept == nullptr && !in_place) {
    LeaseHostMemory(*deps.leases, call, result);
  } else {
    if (keep) LeaseDeviceMemory(deps, launched, result);
    KeepOutputs(call, result);
  }
  return result;
}

// Until they are sent.
void Answer::KeepOutputs(AdmittedCall& call, Result& result) {
  struct Outputs {
    Ticket ticket;  // returned after the memory
    StagingBlock block;
  };
  StagedTensors& staged = call.staged();
  staged.inputs.Release();
  auto kept =
      std::make_shared<Outputs>(Outputs{std::move(call.ticket()), std::move(staged.outputs)});
  kept->ticket.ReleaseWork();
  kept->ticket.ShrinkTo(kept->block.size());
  result.memory_ = std::move(kept);
}

// The outputs of a kept forward are sent from the residual, which the lease, if granted, shares.
void Answer::LeaseHostMemory(LeaseTable& leases, AdmittedCall& call, Result& result) {
  StagedTensors& staged = call.staged();
  staged.inputs.SplitOff(call.input_bytes());  // the workspace
  Ticket ticket = std::move(call.ticket());
  ticket.BecomeLease(staged.inputs.size() + staged.outputs.size());
  auto residual = std::make_shared<const ResidualTensors>(result.call().problem(),
                                                          std::move(staged), std::move(ticket));
  result.memory_ = residual;
  result.lease_ = leases.Grant(WishOf(result.call(), call.context().caller), std::move(residual));
}

// The engine has left the tensors on the device: staging memory is the reply's alone. If it had no
// room, tensors that it read in place are not copied either: the caller still has them.
void Answer::LeaseDeviceMemory(const DeviceWorkerDeps& deps, LaunchedCall& launched,
                               Result& result) {
  if (launched.kept == nullptr) return deps.metrics.LeaseRefused();
  AdmittedCall& call = launched.call;
  Ticket ticket = call.ticket().LeaseDeviceMemory(launched.kept->bytes());
  auto residual = std::make_shared<const ResidualTensors>(
      result.call().problem(), std::move(launched.kept), deps.device, std::move(ticket));
  result.lease_ =
      deps.leases->Grant(WishOf(result.call(), call.context().caller), std::move(residual));
}

}  // namespace attnd
