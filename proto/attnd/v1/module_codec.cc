#include "proto/attnd/v1/module_codec.h"

#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "modules/call_rows.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/attention_op_codec.h"
#include "proto/attnd/v1/problem_codec.h"

namespace attnd {
namespace {

// An enum's number, which has to be one of 1..most.
template <class Kind>
absl::StatusOr<Kind> DecodeEnum(const std::string& path, int number, int most) {
  RETURN_IF_ERROR(FieldInRange(path, number, 1, most));
  return static_cast<Kind>(number);
}

absl::StatusOr<ElementType> DecodeElement(const std::string& path, v1::Element element) {
  if (element >= v1::ELEMENT_FLOAT16 && element <= v1::ELEMENT_FLOAT32) {
    return static_cast<ElementType>(element);
  }
  return WrongField(path, "ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32",
                    static_cast<int>(element));
}

LinearOp DecodeLinear(const v1::Linear& wire) {
  LinearOp op{.input = wire.input(), .weight = wire.weight(), .transposed = wire.transposed()};
  if (wire.has_bias()) op.bias = wire.bias();
  return op;
}

absl::StatusOr<NormOp> DecodeNorm(const v1::Norm& wire, const std::string& path) {
  NormOp op{.input = wire.input(),
            .epsilon = wire.epsilon(),
            .weight_offset = wire.weight_offset(),
            .round_before_weight = wire.round_before_weight()};
  ASSIGN_OR_RETURN(op.kind, DecodeEnum<NormKind>(absl::StrCat(path, ".kind"), wire.kind(), 2));
  if (wire.has_weight()) op.weight = wire.weight();
  if (wire.has_bias()) op.bias = wire.bias();
  return op;
}

absl::StatusOr<ActivationOp> DecodeActivation(const v1::Activation& wire, const std::string& path) {
  ActivationOp op{.input = wire.input()};
  ASSIGN_OR_RETURN(op.kind,
                   DecodeEnum<ActivationKind>(absl::StrCat(path, ".kind"), wire.kind(), 6));
  return op;
}

absl::StatusOr<BinaryOp> DecodeBinary(const v1::Binary& wire, const std::string& path) {
  BinaryOp op{.a = wire.a(), .b = wire.b(), .b_scale = wire.b_scale() == 0 ? 1 : wire.b_scale()};
  ASSIGN_OR_RETURN(op.kind, DecodeEnum<BinaryKind>(absl::StrCat(path, ".kind"), wire.kind(), 2));
  return op;
}

absl::StatusOr<DropoutOp> DecodeDropout(const v1::DropoutOp& wire, const std::string& path) {
  ASSIGN_OR_RETURN(const uint32_t threshold, DecodeDropoutP(path, "p", wire.p()));
  return DropoutOp{.input = wire.input(), .threshold = threshold};
}

absl::StatusOr<ModuleOp> DecodeOp(const v1::Op& wire, const std::string& path) {
  ModuleOp op{.wide = wire.wide()};
  switch (wire.kind_case()) {
    case v1::Op::kLinear:
      op.kind = DecodeLinear(wire.linear());
      break;
    case v1::Op::kNorm: {
      ASSIGN_OR_RETURN(op.kind, DecodeNorm(wire.norm(), absl::StrCat(path, ".norm")));
      break;
    }
    case v1::Op::kAttention: {
      ASSIGN_OR_RETURN(op.kind,
                       DecodeAttentionOp(wire.attention(), absl::StrCat(path, ".attention")));
      break;
    }
    case v1::Op::kActivation: {
      ASSIGN_OR_RETURN(op.kind,
                       DecodeActivation(wire.activation(), absl::StrCat(path, ".activation")));
      break;
    }
    case v1::Op::kBinary: {
      ASSIGN_OR_RETURN(op.kind, DecodeBinary(wire.binary(), absl::StrCat(path, ".binary")));
      break;
    }
    case v1::Op::kDropout: {
      ASSIGN_OR_RETURN(op.kind, DecodeDropout(wire.dropout(), absl::StrCat(path, ".dropout")));
      break;
    }
    case v1::Op::KIND_NOT_SET:
      break;  // refused with the rest of the block
  }
  return op;
}

absl::StatusOr<ModuleBlock> DecodeBlock(const v1::Block& wire, const std::string& path) {
  ModuleBlock block;
  RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".op"), wire.op_size(), 1, kMaxBlockOps));
  for (const v1::Parameter& parameter : wire.parameter()) {
    block.parameters.push_back(
        {parameter.name(), {parameter.shape().begin(), parameter.shape().end()}});
  }
  for (int n = 0; n < wire.op_size(); ++n) {
    ASSIGN_OR_RETURN(ModuleOp op, DecodeOp(wire.op(n), absl::StrCat(path, ".op[", n, "]")));
    block.ops.push_back(std::move(op));
  }
  return block;
}

ModuleLayer DecodeLayer(const v1::Layer& wire) {
  ModuleLayer layer{
      .block = wire.block(),
      .prefix = wire.prefix(),
      .frozen = {wire.frozen().begin(), wire.frozen().end()},
      .attention_scale = {wire.attention_scale().begin(), wire.attention_scale().end()}};
  if (wire.has_device()) layer.device = wire.device();
  return layer;
}

// ---- Encoding.

struct OpEncoder {
  v1::Op& wire;
  void operator()(std::monostate) {}
  void operator()(const LinearOp& op) {
    v1::Linear& to = *wire.mutable_linear();
    to.set_input(static_cast<uint32_t>(op.input));
    to.set_weight(static_cast<uint32_t>(op.weight));
    if (op.bias.has_value()) to.set_bias(static_cast<uint32_t>(*op.bias));
    to.set_transposed(op.transposed);
  }
  void operator()(const NormOp& op) {
    v1::Norm& to = *wire.mutable_norm();
    to.set_input(static_cast<uint32_t>(op.input));
    to.set_kind(static_cast<v1::NormKind>(op.kind));
    to.set_epsilon(op.epsilon);
    if (op.weight.has_value()) to.set_weight(static_cast<uint32_t>(*op.weight));
    if (op.bias.has_value()) to.set_bias(static_cast<uint32_t>(*op.bias));
    to.set_weight_offset(op.weight_offset);
    to.set_round_before_weight(op.round_before_weight);
  }
  void operator()(const AttentionOp& op) { *wire.mutable_attention() = EncodeAttentionOp(op); }
  void operator()(const ActivationOp& op) {
    v1::Activation& to = *wire.mutable_activation();
    to.set_input(static_cast<uint32_t>(op.input));
    to.set_kind(static_cast<v1::ActivationKind>(op.kind));
  }
  void operator()(const BinaryOp& op) {
    v1::Binary& to = *wire.mutable_binary();
    to.set_kind(static_cast<v1::BinaryKind>(op.kind));
    to.set_a(static_cast<uint32_t>(op.a));
    to.set_b(static_cast<uint32_t>(op.b));
    to.set_b_scale(op.b_scale);
  }
  void operator()(const DropoutOp& op) {
    v1::DropoutOp& to = *wire.mutable_dropout();
    to.set_input(static_cast<uint32_t>(op.input));
    to.set_p(static_cast<float>(op.threshold) / 256);
  }
};

void EncodeBlock(const ModuleBlock& block, v1::Block& wire) {
  for (const ModuleParameter& parameter : block.parameters) {
    v1::Parameter& to = *wire.add_parameter();
    to.set_name(parameter.name);
    for (int64_t dimension : parameter.shape) to.add_shape(static_cast<uint32_t>(dimension));
  }
  for (const ModuleOp& op : block.ops) {
    v1::Op& to = *wire.add_op();
    to.set_wide(op.wide);
    std::visit(OpEncoder{to}, op.kind);
  }
}

void EncodeLayer(const ModuleLayer& layer, v1::Layer& wire) {
  wire.set_block(static_cast<uint32_t>(layer.block));
  wire.set_prefix(layer.prefix);
  for (int64_t parameter : layer.frozen) wire.add_frozen(static_cast<uint32_t>(parameter));
  for (float scale : layer.attention_scale) wire.add_attention_scale(scale);
  if (layer.device.has_value()) wire.set_device(static_cast<uint32_t>(*layer.device));
}

}  // namespace

absl::StatusOr<ModuleLayout> DecodeModuleLayout(const v1::ModuleLayout& wire) {
  RETURN_IF_ERROR(FieldInRange("version", wire.version(), 1, 1));
  const int64_t bytes = static_cast<int64_t>(wire.ByteSizeLong());
  if (bytes > kMaxLayoutBytes) {
    return WrongField("layout", absl::StrCat("at most ", kMaxLayoutBytes, " bytes"), bytes);
  }
  RETURN_IF_ERROR(FieldInRange("block", wire.block_size(), 1, kMaxModuleBlocks));
  RETURN_IF_ERROR(FieldInRange("layer", wire.layer_size(), 1, kMaxModuleLayers));
  ModuleLayout layout;
  layout.width = wire.width();
  layout.memory_width = wire.memory_width();
  ASSIGN_OR_RETURN(layout.element, DecodeElement("element", wire.element()));
  layout.wide_element = layout.element;
  if (wire.wide_element() != v1::ELEMENT_UNSPECIFIED) {
    ASSIGN_OR_RETURN(layout.wide_element, DecodeElement("wide_element", wire.wide_element()));
  }
  ASSIGN_OR_RETURN(layout.parameter_element,
                   DecodeElement("parameter_element", wire.parameter_element()));
  for (int n = 0; n < wire.block_size(); ++n) {
    ASSIGN_OR_RETURN(ModuleBlock block, DecodeBlock(wire.block(n), absl::StrCat("block[", n, "]")));
    layout.blocks.push_back(std::move(block));
  }
  for (const v1::Layer& layer : wire.layer()) layout.layers.push_back(DecodeLayer(layer));
  return layout;
}

v1::ModuleLayout EncodeModuleLayout(const ModuleLayout& layout) {
  v1::ModuleLayout wire;
  wire.set_version(1);
  wire.set_width(static_cast<uint32_t>(layout.width));
  wire.set_memory_width(static_cast<uint32_t>(layout.memory_width));
  wire.set_element(static_cast<v1::Element>(layout.element));
  wire.set_wide_element(static_cast<v1::Element>(layout.wide_element));
  wire.set_parameter_element(static_cast<v1::Element>(layout.parameter_element));
  for (const ModuleBlock& block : layout.blocks) EncodeBlock(block, *wire.add_block());
  for (const ModuleLayer& layer : layout.layers) EncodeLayer(layer, *wire.add_layer());
  return wire;
}

absl::StatusOr<OptimizerSpec> DecodeOptimizer(const v1::OptimizerLayout& wire) {
  OptimizerSpec spec;
  spec.groups.assign(wire.group().begin(), wire.group().end());
  switch (wire.kind_case()) {
    case v1::OptimizerLayout::kSgd:
      spec.kind = OptimizerKind::kSgd;
      spec.momentum = wire.sgd().momentum();
      spec.dampening = wire.sgd().dampening();
      spec.nesterov = wire.sgd().nesterov();
      return spec;
    case v1::OptimizerLayout::kAdamw:
      spec.kind = OptimizerKind::kAdamW;
      spec.beta1 = wire.adamw().beta1();
      spec.beta2 = wire.adamw().beta2();
      spec.epsilon = wire.adamw().epsilon();
      spec.coupled_decay = wire.adamw().coupled_decay();
      spec.amsgrad = wire.adamw().amsgrad();
      return spec;
    case v1::OptimizerLayout::kNone:
      return spec;
    case v1::OptimizerLayout::KIND_NOT_SET:
      break;
  }
  return WrongField("optimizer", "one of sgd, adamw, none", "nothing");
}

v1::OptimizerLayout EncodeOptimizer(const OptimizerSpec& spec) {
  v1::OptimizerLayout wire;
  for (uint32_t group : spec.groups) wire.add_group(group);
  switch (spec.kind) {
    case OptimizerKind::kNone:
      wire.mutable_none();
      break;
    case OptimizerKind::kSgd:
      wire.mutable_sgd()->set_momentum(spec.momentum);
      wire.mutable_sgd()->set_dampening(spec.dampening);
      wire.mutable_sgd()->set_nesterov(spec.nesterov);
      break;
    case OptimizerKind::kAdamW:
      wire.mutable_adamw()->set_beta1(spec.beta1);
      wire.mutable_adamw()->set_beta2(spec.beta2);
      wire.mutable_adamw()->set_epsilon(spec.epsilon);
      wire.mutable_adamw()->set_coupled_decay(spec.coupled_decay);
      wire.mutable_adamw()->set_amsgrad(spec.amsgrad);
      break;
  }
  return wire;
}

absl::StatusOr<ModuleLimits> DecodeModuleLimits(const v1::ModuleLimits& wire) {
  const std::pair<absl::string_view, uint64_t> counts[] = {
      {"limits.max_rows", wire.max_rows()},
      {"limits.kept_rows", wire.kept_rows()},
      {"limits.max_memory_rows", wire.max_memory_rows()},
      {"limits.kept_memory_rows", wire.kept_memory_rows()}};
  for (const auto& [field, count] : counts) {
    if (count > static_cast<uint64_t>(kMaxCallRows)) {
      return WrongField(field, absl::StrCat("at most ", kMaxCallRows), count);
    }
  }
  RETURN_IF_ERROR(FieldInRange("limits.recompute", wire.recompute(), 0, 3));
  ModuleLimits limits{.max_rows = static_cast<int64_t>(wire.max_rows()),
                      .kept_rows = static_cast<int64_t>(wire.kept_rows()),
                      .max_memory_rows = static_cast<int64_t>(wire.max_memory_rows()),
                      .kept_memory_rows = static_cast<int64_t>(wire.kept_memory_rows())};
  if (wire.recompute() != v1::RECOMPUTE_AUTO) {
    limits.recompute = static_cast<Recompute>(wire.recompute());
  }
  return limits;
}

}  // namespace attnd
