#include "server/modules/module_calls.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "modules/check_rows.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "proto/attnd/v1/rows_codec.h"
#include "server/call/status_details.h"
#include "server/modules/module_errors.h"
#include "server/modules/running_digest.h"

namespace attnd {

absl::Status ModuleCalls::Run(ModuleMethod method, ModuleCall& call) {
  switch (method) {
    case ModuleMethod::kRegister:
      return Register(call);
    case ModuleMethod::kGetModule:
      return GetModule(call);
    case ModuleMethod::kListModules:
      return ListModules(call);
    case ModuleMethod::kRenew:
      return Renew(call);
    case ModuleMethod::kRelease:
      return Release(call);
    case ModuleMethod::kForward:
      return Forward(call);
    case ModuleMethod::kBackward:
      return Backward(call);
    case ModuleMethod::kGradientStats:
      return GradientStatsOf(call);
    case ModuleMethod::kSumGradients:
      return SumGradients(call);
    case ModuleMethod::kStep:
      return Step(call);
    case ModuleMethod::kPutTensors:
      return PutTensors(call);
    case ModuleMethod::kGetTensors:
      return GetTensors(call);
    case ModuleMethod::kCarry:
      return Carry(call);
  }
  return absl::InternalError("no such method");
}

absl::Status ModuleCalls::CheckNotDraining() const {
  return draining_ ? ModulesDraining() : absl::OkStatus();
}

// A call that is refused is no use of its module, for which a drain would wait.
absl::Status ModuleCalls::CheckServes(const std::string& token, const std::string& caller) const {
  if (!draining_ || deps_.table.FinishesStep(token, caller)) return absl::OkStatus();
  return ModulesDraining();
}

std::vector<ComputeTurns*> ModuleCalls::TurnsOf(const RegisteredModule& module) {
  std::vector<ComputeTurns*> turns;
  for (size_t n = 0; n < turns_.size(); ++n) {
    if (module.IsOn(static_cast<int>(n))) turns.push_back(&turns_[n]);
  }
  return turns;
}

absl::StatusOr<std::unique_ptr<DeviceTurns>> ModuleCalls::TakeDevices(
    ModuleCall& call, const RegisteredModule& module, double seconds) {
  auto turns = std::make_unique<DeviceTurns>(
      TurnsOf(module), TurnWish{call.caller, call.wait.stop, call.wait.deadline, seconds});
  if (!turns->Take()) return call.wait.Stopped();
  call.times.turn = SteadyNow();
  return turns;
}

// Estimates that are twice too long refuse nobody.
absl::Status ModuleCalls::RefuseLate(const ModuleCall& call, const RegisteredModule& module,
                                     double seconds) {
  if (seconds == 0) return absl::OkStatus();
  double needed = 0;
  for (const ComputeTurns* turns : TurnsOf(module)) {
    needed = std::max(needed, turns->SecondsUntilDone(call.caller, seconds));
  }
  const double left = absl::ToDoubleSeconds(call.wait.deadline - SteadyNow());
  if (needed / 2 <= left) return absl::OkStatus();
  const std::string needed_text = absl::StrCat(needed), left_text = absl::StrCat(left);
  return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineUnmeetable,
                 absl::StrCat("deadline: about ", needed_text, " s of work lie before the answer, ",
                              left_text, " s are left"),
                 {{"estimated_seconds", needed_text}, {"remaining_seconds", left_text}});
}

std::vector<std::string> ModuleCalls::NamesOf(const EnginePlan& plan) const {
  std::vector<std::string> names;
  for (const EnginePlan& part : plan.parts()) {
    const std::string& name = deps_.devices[part.device];
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

v1::Receipt ModuleCalls::Computed(const RegisteredModule& module, bool is_forward, int64_t rows,
                                  const ModuleCall& call) const {
  const ModuleTimes& times = call.times;
  const absl::Duration took = call.compute;
  // By a clock that may be set meanwhile.
  const absl::Duration queued =
      std::max(times.computed - times.landed - took, absl::ZeroDuration());
  const std::string devices = absl::StrJoin(module.record().devices, "+");
  deps_.metrics.Computed(devices, is_forward, rows, queued, took);
  const double of_most =
      static_cast<double>(rows) / static_cast<double>(module.record().limits.max_rows);
  for (const EnginePlan& part : module.plan().parts()) {
    const ModulePlan& plan = part.plan;
    const std::string& device = deps_.devices[part.device];
    deps_.metrics.Worked(device, is_forward,
                         of_most * (is_forward ? plan.forward_flops : plan.backward_flops));
    if (is_forward) continue;
    const auto kept =
        std::count(plan.recompute.begin(), plan.recompute.end(), attnd::Recompute::kNone);
    deps_.metrics.Recomputed(device, static_cast<int64_t>(plan.recompute.size()) - kept);
  }
  v1::Receipt receipt;
  receipt.set_backend(deps_.engine.Name());
  receipt.set_device(devices);
  receipt.set_accumulate(v1::ACCUMULATE_FLOAT32);
  receipt.set_batched_with(1);
  receipt.set_deterministic(true);
  auto add = [&](const char* name, absl::Duration time) {
    v1::Stage& stage = *receipt.add_stage();
    stage.set_name(name);
    stage.set_nanoseconds(
        static_cast<uint64_t>(absl::ToInt64Nanoseconds(std::max(time, absl::ZeroDuration()))));
  };
  const absl::Duration upload = absl::Seconds(times.transfers.upload);
  const absl::Duration download = absl::Seconds(times.transfers.download);
  add("receive", times.admitted - times.began);
  add("queue", queued);
  add("h2d", times.landed - times.admitted + upload);
  add("kernel", took - upload - download);
  add("d2h", download);
  return receipt;
}

std::string DigestOf(const google::protobuf::Message& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream text(&bytes);
    google::protobuf::io::CodedOutputStream out(&text);
    out.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&out);
  }
  return DigestOf(bytes);
}

absl::StatusOr<CallRows> DecodeCallRows(const v1::Rows& wire, const RegisteredModule& module) {
  absl::StatusOr<CallRows> rows = DecodeRows(wire);
  absl::Status status = rows.status();
  if (status.ok()) status = CheckRows(module.description().graph, *rows);
  const ModuleLimits& limits = module.record().limits;
  if (status.ok() && rows->rows() > limits.max_rows) {
    status = WrongField("rows", absl::StrCat("at most limits.max_rows = ", limits.max_rows),
                        rows->rows());
  }
  if (status.ok() && rows->memory_rows() > limits.max_memory_rows) {
    status = WrongField(
        "rows.memory_length",
        absl::StrCat("at most limits.max_memory_rows = ", limits.max_memory_rows, " rows"),
        rows->memory_rows());
  }
  if (!status.ok()) return Classified(std::move(status));
  return rows;
}

absl::StatusOr<LayerRange> DecodeLayers(const v1::ModuleForwardHeader& header,
                                        const ModuleGraph& graph) {
  const LayerRange layers = graph.Resolved({header.first_layer(), header.end_layer()});
  absl::Status status = FieldInRange("end_layer", layers.end, 1, graph.layers());
  if (status.ok()) status = FieldInRange("first_layer", layers.first, 0, layers.end - 1);
  if (!status.ok()) return Classified(std::move(status));
  return layers;
}

int64_t ActivationBytes(const ModuleGraph& graph, const CallRows& rows, int64_t layer) {
  return rows.rows() * graph.layout().width * ElementBytes(graph.BorderElement(layer));
}

std::vector<PayloadSpec> ForwardInputs(const ModuleGraph& graph, const CallRows& rows,
                                       int64_t first_layer) {
  const ModuleLayout& layout = graph.layout();
  std::vector<PayloadSpec> specs;
  if (rows.bool_mask.has_value()) {
    specs.push_back({kMaskBitsField, "mask_bits", rows.bool_mask->bytes(), true});
  }
  if (layout.memory_width > 0) {
    const int64_t numbers = rows.memory_rows() * layout.memory_width;
    specs.push_back({kMemoryField, "memory", numbers * ElementBytes(layout.element), true});
  }
  specs.push_back({kXField, "x", ActivationBytes(graph, rows, first_layer), true});
  return specs;
}

grpc::ByteBuffer FramedHeader(const google::protobuf::Message& header) {
  const grpc::Slice slice(FrameHeader(header.SerializeAsString()));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace attnd
