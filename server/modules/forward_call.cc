// Forward of a module, and Carry: a further stream for the chunks of a call.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/run_forward.h"

namespace attnd {
absl::Time ModuleCalls::ActivationsExpire(const v1::CallOptions& options) const {
  absl::Duration ttl = absl::Milliseconds(options.residual_ttl_ms());
  if (ttl == absl::ZeroDuration()) ttl = deps_.activation_ttl;
  return deps_.table.clock().Now() + std::min(ttl, deps_.max_activation_ttl);
}

absl::Status ModuleCalls::Forward(ModuleCall& call) {
  const google::protobuf::Descriptor& type = *v1::ModuleForwardRequest::descriptor();
  v1::ModuleForwardHeader header;
  RETURN_IF_ERROR(ReadHeader(call.stream, type, header));
  RETURN_IF_ERROR(CheckServes(header.token(), call.caller));
  ASSIGN_OR_RETURN(const Module module, deps_.table.Find(header.token(), call.caller));
  std::optional<uint64_t> wanted;
  if (header.has_sequence()) wanted = header.sequence();
  RETURN_IF_ERROR(module->CheckSequence(wanted));
  RETURN_IF_ERROR(module->CheckWeights());
  if (header.options().keep_residual()) {
    return FieldError(reason::kBadField, "options.keep_residual", "none", "true");
  }
  const ModuleGraph& graph = module->description().graph;
  ASSIGN_OR_RETURN(CallRows rows, DecodeCallRows(header.rows(), *module));
  ASSIGN_OR_RETURN(const LayerRange layers, DecodeLayers(header, graph));
  const int64_t layer_rows = rows.rows() * layers.size();
  const double seconds = module->pace().SecondsFor(PacedCall::kForward, layer_rows);
  RETURN_IF_ERROR(RefuseLate(call, *module, seconds));
  std::vector<PayloadSpec> specs = ForwardInputs(graph, rows, layers.first);
  specs.push_back({kYField, "y", ActivationBytes(graph, rows, layers.end), false});
  ASSIGN_OR_RETURN(Payloads payloads, Payloads::Make(std::move(specs), ToldPayloads::In(header),
                                                     MemoryOf(call), call.stream));
  call.times.admitted = SteadyNow();
  RETURN_IF_ERROR(payloads.Receive(call.stream, type, call.wait));
  call.times.landed = SteadyNow();

  const bool keep = header.training() && module->record().limits.kept_rows > 0;
  const CallDropout dropout{header.training(), header.seed(), header.offset()};
  v1::ModuleForwardResult result;
  {
    ASSIGN_OR_RETURN(RegisteredModule::Hold hold, module->Take(wanted, call.wait));
    ASSIGN_OR_RETURN(const auto turns, TakeDevices(call, *module, seconds));
    ASSIGN_OR_RETURN(
        const ActivationId activation,
        RunForward(hold, {&rows, layers, dropout, header.makes_room(), &call.times.transfers}, keep,
                   payloads, call.wait, *turns));
    call.compute = turns->computed();
    call.times.computed = SteadyNow();
    module->pace().Took(PacedCall::kForward, layer_rows, absl::ToDoubleSeconds(call.compute));
    *result.mutable_receipt() = Computed(*module, true, rows.rows(), call);
    result.set_sequence(hold.sequence());
    if (keep) {
      const absl::Time expires = ActivationsExpire(header.options());
      const uint64_t kept =
          hold.Keep({activation, rows, dropout, layers, ForwardDigest(header), expires});
      v1::Residual& residual = *result.mutable_activations();
      residual.set_token(deps_.table.ActivationToken(*module, kept));
      residual.set_expires_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(WallTime(expires))));
    }
  }
  payloads.List(*result.mutable_payload());
  return payloads.Send(call.stream, FramedHeader(result));
}

absl::Status ModuleCalls::Carry(ModuleCall& call) {
  const google::protobuf::Descriptor& type = *v1::ModuleCarryRequest::descriptor();
  v1::ModuleCarryHeader header;
  RETURN_IF_ERROR(ReadHeader(call.stream, type, header));
  RETURN_IF_ERROR(deps_.table.Find(header.token(), call.caller).status());
  RETURN_IF_ERROR(CheckCarry(header.carry()));
  const std::shared_ptr<Carriage> carriage = carriages_.Of(call.caller, header.carry());
  RETURN_IF_ERROR(carriage->AwaitAdmitted(call.wait));
  const bool begun =
      call.stream.Write(FramedHeader(v1::ModuleCarryResult())) && call.stream.Flush();
  const absl::Status brought =
      begun ? ReceiveCarried(call.stream, type, *carriage) : BrokenOr(call.stream, CallerIsGone());
  carriage->BroughtAll(brought);
  RETURN_IF_ERROR(brought);
  ASSIGN_OR_RETURN(const std::shared_ptr<ChunkQueue> chunks, carriage->AwaitLeaving(call.wait));
  return SendChunks(call.stream, *chunks);
}

}  // namespace attnd
