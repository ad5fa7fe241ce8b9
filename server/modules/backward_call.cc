// Backward of a module. The activations are those of a token, or are computed again from x.

#include <future>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_errors.h"
#include "server/modules/run_forward.h"
#include "server/modules/running_digest.h"

namespace attnd {

struct ModuleCalls::Gradient {
  v1::ModuleBackwardHeader header;
  Module module;
  uint64_t kept = 0;  // its number; 0: the forward comes with the call
  CallRows rows;
  LayerRange layers;
  CallDropout dropout;
  std::string forward_digest;  // of rows, layers, seed and offset
  double seconds = 0;          // estimated
  Payloads payloads;
  // Computed while the gradients are, where dy is large. None where nothing is added.
  std::shared_future<std::string> dy_digest;
  v1::ModuleBackwardResult result;

  int64_t layer_rows() const { return rows.rows() * layers.size(); }
  std::string digest() const { return forward_digest + dy_digest.get(); }
};

namespace {

constexpr size_t kSmallDigestBytes = size_t{1} << 20;  // takes as long as a thread that begins
// Deferred where the system has no thread to give.
constexpr std::launch kBesideOrDeferred = std::launch::async | std::launch::deferred;

absl::Status CheckHeader(const v1::ModuleBackwardHeader& header) {
  auto none = [](absl::string_view field, absl::string_view got) {
    return FieldError(reason::kBadField, field, "none", got);
  };
  if (header.activations().empty() != header.has_forward()) {
    return FieldError(reason::kBadField, "activations", "either activations or forward",
                      header.has_forward() ? "both" : "neither");
  }
  if (header.options().keep_residual()) return none("options.keep_residual", "true");
  if (header.no_weight_gradients() && header.micro_batch() != 0) {
    return FieldError(reason::kBadField, "micro_batch", "0 with no_weight_gradients",
                      absl::StrCat(header.micro_batch()));
  }
  if (!header.has_forward()) return absl::OkStatus();
  const v1::ModuleForwardHeader& forward = header.forward();
  if (forward.has_options()) return none("forward.options", "some");
  if (forward.payload_size() > 0) return none("forward.payload", "some");
  if (forward.has_shared_memory()) return none("forward.shared_memory", "some");
  if (!forward.carry().empty()) return none("forward.carry", "some");
  if (!forward.training()) {
    return FieldError(reason::kBadField, "forward.training", "true", "false");
  }
  if (forward.token() == header.token()) return absl::OkStatus();
  return FieldError(reason::kBadField, "forward.token", "the token of this call", "another");
}

std::vector<PayloadSpec> SpecsOf(const ModuleGraph& graph, const CallRows& rows, LayerRange layers,
                                 bool with_forward, bool want_dx) {
  std::vector<PayloadSpec> specs;
  if (with_forward) specs = ForwardInputs(graph, rows, layers.first);
  const int64_t bytes = ActivationBytes(graph, rows, layers.end);
  specs.push_back({kDyField, "dy", bytes, true});
  if (with_forward) specs.push_back({kYField, "y", bytes, false, false});
  if (!want_dx) return specs;
  const ModuleLayout& layout = graph.layout();
  if (layout.memory_width > 0) {
    const int64_t numbers = rows.memory_rows() * layout.memory_width;
    specs.push_back({kDMemoryField, "d_memory", numbers * ElementBytes(layout.element), false});
  }
  specs.push_back({kDxField, "dx", ActivationBytes(graph, rows, layers.first), false});
  return specs;
}

}  // namespace

absl::Status ModuleCalls::Backward(ModuleCall& call) {
  const google::protobuf::Descriptor& type = *v1::ModuleBackwardRequest::descriptor();
  Gradient gradient;
  v1::ModuleBackwardHeader& header = gradient.header;
  RETURN_IF_ERROR(ReadHeader(call.stream, type, header));
  RETURN_IF_ERROR(CheckServes(header.token(), call.caller));
  RETURN_IF_ERROR(CheckHeader(header));
  ASSIGN_OR_RETURN(gradient.module, deps_.table.Find(header.token(), call.caller));
  RegisteredModule& module = *gradient.module;
  const ModuleGraph& graph = module.description().graph;
  RETURN_IF_ERROR(module.CheckSequence(header.sequence()));
  if (!header.no_weight_gradients()) RETURN_IF_ERROR(module.CheckMicroBatch(header.micro_batch()));
  RETURN_IF_ERROR(module.CheckWeights());
  if (header.has_forward()) {
    ASSIGN_OR_RETURN(gradient.rows, DecodeCallRows(header.forward().rows(), module));
    ASSIGN_OR_RETURN(gradient.layers, DecodeLayers(header.forward(), graph));
    gradient.dropout = {true, header.forward().seed(), header.forward().offset()};
    gradient.forward_digest = ForwardDigest(header.forward());
  } else {
    ASSIGN_OR_RETURN(gradient.kept, deps_.table.CheckActivation(header.activations(), module));
    ASSIGN_OR_RETURN(KeptForward kept, module.FindKept(gradient.kept));
    gradient.rows = std::move(kept.rows);
    gradient.layers = kept.layers;
    gradient.forward_digest = std::move(kept.digest);
  }
  gradient.seconds = module.pace().SecondsFor(PacedCall::kBackward, gradient.layer_rows());
  RETURN_IF_ERROR(RefuseLate(call, module, gradient.seconds));
  std::vector<PayloadSpec> specs =
      SpecsOf(graph, gradient.rows, gradient.layers, header.has_forward(), header.want_dx());
  ASSIGN_OR_RETURN(gradient.payloads, Payloads::Make(std::move(specs), ToldPayloads::In(header),
                                                     MemoryOf(call), call.stream));
  // An early one keeps its memory while it waits, and those that it waits for need theirs.
  if (!header.no_weight_gradients() && deps_.admission.HoldsOverHalf(call.caller)) {
    RETURN_IF_ERROR(module.CheckIsNext(header.micro_batch()));
  }
  call.times.admitted = SteadyNow();
  RETURN_IF_ERROR(gradient.payloads.Receive(call.stream, type, call.wait));
  if (!header.no_weight_gradients()) {
    const absl::Span<const std::byte> dy = gradient.payloads[kDyField];
    const bool is_small = dy.size() < kSmallDigestBytes;
    gradient.dy_digest = std::async(is_small ? std::launch::deferred : kBesideOrDeferred,
                                    [this, dy] { return payload_digests_.Of(dy); });
  }
  call.times.landed = SteadyNow();
  RETURN_IF_ERROR(Differentiate(call, gradient));
  gradient.payloads.List(*gradient.result.mutable_payload());
  return gradient.payloads.Send(call.stream, FramedHeader(gradient.result));
}

// The forward's activations: by their token, or computed again, for this call alone.
absl::StatusOr<ActivationId> ModuleCalls::Recompute(RegisteredModule::Hold& hold,
                                                    Gradient& gradient, ModuleCall& call,
                                                    DeviceYield& yield) {
  if (gradient.kept == 0) {
    return RunForward(hold,
                      {&gradient.rows, gradient.layers, gradient.dropout,
                       gradient.header.forward().makes_room(), &call.times.transfers},
                      true, gradient.payloads, call.wait, yield);
  }
  std::optional<KeptForward> kept = hold.Find(gradient.kept);
  if (kept.has_value()) return kept->activation;
  return RenameField(LeaseLost("spent or expired"), "residual_token", "activations");
}

absl::Status ModuleCalls::Differentiate(ModuleCall& call, Gradient& gradient) {
  const v1::ModuleBackwardHeader& header = gradient.header;
  std::optional<RegisteredModule::Hold> hold;
  bool add = false;
  if (header.no_weight_gradients()) {
    ASSIGN_OR_RETURN(RegisteredModule::Hold taken,
                     gradient.module->Take(header.sequence(), call.wait));
    hold.emplace(std::move(taken));
  } else {
    ASSIGN_OR_RETURN(
        RegisteredModule::MicroBatchTurn turn,
        gradient.module->TakeMicroBatch(
            header.sequence(), header.micro_batch(), [&] { return gradient.digest(); }, call.wait));
    add = !turn.added;
    if (turn.added) deps_.metrics.BackwardReplayed();
    hold.emplace(std::move(turn.hold));
  }
  ASSIGN_OR_RETURN(const auto turns, TakeDevices(call, *gradient.module, gradient.seconds));
  ASSIGN_OR_RETURN(const ActivationId activation, Recompute(*hold, gradient, call, *turns));
  const absl::Cleanup drop = [&] {
    if (gradient.kept == 0) hold->instance().DropActivation(activation);
  };
  absl::Status done = hold->instance().Backward({.activation = activation,
                                                 .dy = gradient.payloads[kDyField],
                                                 .add_gradients = add,
                                                 .dx = gradient.payloads[kDxField],
                                                 .d_memory = gradient.payloads[kDMemoryField],
                                                 .stop = call.wait.stop,
                                                 .yield = turns.get(),
                                                 .transfers = &call.times.transfers});
  call.compute = turns->computed();
  call.times.computed = SteadyNow();
  if (done.code() == absl::StatusCode::kCancelled) return call.wait.Stopped();
  if (!done.ok()) {
    if (add) hold->Fail();
    return Classified(std::move(done));
  }
  if (add) hold->Added(gradient.digest());
  if (gradient.kept != 0) hold->Drop(gradient.kept);
  const int64_t rows = gradient.rows.rows();
  gradient.module->pace().Took(PacedCall::kBackward, gradient.layer_rows(),
                               absl::ToDoubleSeconds(call.compute));
  *gradient.result.mutable_receipt() = Computed(*gradient.module, false, rows, call);
  gradient.result.set_added(add);
  return absl::OkStatus();
}

}  // namespace attnd
