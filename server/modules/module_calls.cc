#include "server/modules/module_calls.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

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
    case ModuleMethod::kStep:
      return Step(call);
    case ModuleMethod::kPutTensors:
      return PutTensors(call);
    case ModuleMethod::kGetTensors:
      return GetTensors(call);
  }
  return absl::InternalError("no such method");
}

absl::Status ModuleCalls::CheckNotDraining() const {
  return draining_ ? ModulesDraining() : absl::OkStatus();
}

absl::StatusOr<ComputeTurns::Turn> ModuleCalls::TakeDevice(const ModuleCall& call) {
  ComputeTurns::Turn turn = turns_.Take(call.caller, call.wait.stop, call.wait.deadline);
  if (!turn) return call.wait.Stopped();
  return turn;
}

v1::Receipt ModuleCalls::ReceiptOf(absl::Duration queued, absl::Duration took) const {
  v1::Receipt receipt;
  receipt.set_backend(deps_.engine.Name());
  receipt.set_device(deps_.device);
  receipt.set_accumulate(v1::ACCUMULATE_FLOAT32);
  receipt.set_batched_with(1);
  receipt.set_deterministic(true);
  auto add = [&](const char* name, absl::Duration time) {
    v1::Stage& stage = *receipt.add_stage();
    stage.set_name(name);
    stage.set_nanoseconds(static_cast<uint64_t>(absl::ToInt64Nanoseconds(time)));
  };
  add("queue", queued);
  add("kernel", took);
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

double FlopsOf(const RegisteredModule& module, bool is_forward, int64_t rows) {
  const ModuleRecord& record = module.record();
  const double of_most = is_forward ? record.plan.forward_flops() : record.plan.backward_flops();
  return of_most * static_cast<double>(rows) / static_cast<double>(record.limits.max_rows);
}

int64_t ActivationBytes(const ModuleGraph& graph, const CallRows& rows) {
  return rows.rows() * graph.layout().width * ElementBytes(graph.layout().element);
}

std::vector<PayloadSpec> ForwardInputs(const ModuleGraph& graph, const CallRows& rows) {
  const ModuleLayout& layout = graph.layout();
  std::vector<PayloadSpec> specs;
  if (rows.bool_mask.has_value()) {
    specs.push_back({kMaskBitsField, "mask_bits", rows.bool_mask->bytes(), true});
  }
  if (layout.memory_width > 0) {
    const int64_t numbers = rows.memory_rows() * layout.memory_width;
    specs.push_back({kMemoryField, "memory", numbers * ElementBytes(layout.element), true});
  }
  specs.push_back({kXField, "x", ActivationBytes(graph, rows), true});
  return specs;
}

grpc::ByteBuffer FramedHeader(const google::protobuf::Message& header) {
  const grpc::Slice slice(FrameHeader(header.SerializeAsString()));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace attnd
