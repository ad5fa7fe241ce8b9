#include "modules/op_uses.h"

#include <optional>
#include <variant>

namespace attnd {
namespace {

struct Values {
  std::vector<ValueUse> operator()(std::monostate) { return {}; }
  std::vector<ValueUse> operator()(const LinearOp& op) { return {{"input", op.input}}; }
  std::vector<ValueUse> operator()(const NormOp& op) { return {{"input", op.input}}; }
  std::vector<ValueUse> operator()(const AttentionOp& op) {
    return {{"q.value", op.q.value}, {"k.value", op.k.value}, {"v.value", op.v.value}};
  }
  std::vector<ValueUse> operator()(const ActivationOp& op) { return {{"input", op.input}}; }
  std::vector<ValueUse> operator()(const BinaryOp& op) { return {{"a", op.a}, {"b", op.b}}; }
  std::vector<ValueUse> operator()(const DropoutOp& op) { return {{"input", op.input}}; }
};

struct Parameters {
  std::vector<ParameterUse> uses;
  void Add(absl::string_view field, const std::optional<int64_t>& parameter) {
    if (parameter.has_value()) uses.push_back({field, *parameter});
  }
  void operator()(const LinearOp& op) {
    Add("weight", op.weight);
    Add("bias", op.bias);
  }
  void operator()(const NormOp& op) {
    Add("weight", op.weight);
    Add("bias", op.bias);
  }
  void operator()(const AttentionOp& op) {
    Add("q_norm", op.q_norm);
    Add("k_norm", op.k_norm);
  }
  template <class Other>
  void operator()(const Other&) {}
};

}  // namespace

std::vector<ValueUse> ValuesOf(const ModuleOp& op) { return std::visit(Values(), op.kind); }

std::vector<ParameterUse> ParametersOf(const ModuleOp& op) {
  Parameters parameters;
  std::visit(parameters, op.kind);
  return parameters.uses;
}

absl::string_view OpName(const ModuleOp& op) {
  constexpr absl::string_view kNames[] = {"",           "linear", "norm",   "attention",
                                          "activation", "binary", "dropout"};
  return kNames[op.kind.index()];
}

}  // namespace attnd
