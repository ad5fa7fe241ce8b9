#include <string>
#include <variant>

#include "base/status_macros.h"
#include "modules/check_layout.h"
#include "modules/field_error.h"
#include "modules/op_uses.h"

namespace attnd {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) {
  return shape.size() == 1 ? absl::StrCat("[", shape[0], "]")
                           : absl::StrCat("[", shape[0], ", ", shape[1], "]");
}

// Walks the ops of one block in order and finds each output's shape.
class BlockCheck {
 public:
  BlockCheck(const ModuleLayout& layout, int64_t number)
      : layout_(layout),
        block_(layout.blocks[number]),
        block_path_(absl::StrCat("block[", number, "]")),
        used_values_(block_.ops.size() + kFirstOpValue),
        used_parameters_(block_.parameters.size()) {
    shapes_.values = {{RowKind::kInput, layout.width}, {RowKind::kMemory, layout.memory_width}};
  }

  absl::StatusOr<BlockShapes> Run() {
    for (size_t n = 0; n < block_.ops.size(); ++n) {
      const ModuleOp& op = block_.ops[n];
      op_path_ = absl::StrCat(block_path_, ".op[", n, "]");
      path_ = absl::StrCat(op_path_, ".", OpName(op));
      RETURN_IF_ERROR(CheckUses(op));
      if (std::holds_alternative<AttentionOp>(op.kind)) shapes_.attention_ops.push_back(n);
      ASSIGN_OR_RETURN(ValueShape shape, std::visit(*this, op.kind));
      shape.wide = op.wide;
      shapes_.values.push_back(shape);
    }
    RETURN_IF_ERROR(CheckOutput());
    RETURN_IF_ERROR(CheckAllIsUsed());
    return std::move(shapes_);
  }

  absl::StatusOr<ValueShape> operator()(std::monostate) {
    return WrongField(op_path_, "one of linear, norm, attention, activation, binary, dropout",
                      "none");
  }

  absl::StatusOr<ValueShape> operator()(const LinearOp& op) {
    const ValueShape& in = Shape(op.input);
    const std::vector<int64_t>& weight = block_.parameters[op.weight].shape;
    const int in_dimension = op.transposed ? 0 : 1;
    if (weight.size() != 2 || weight[in_dimension] != in.columns) {
      return WrongField(
          Field("weight"),
          absl::StrCat(op.transposed ? "[" : "[out, ", in.columns, op.transposed ? ", out]" : "]"),
          ShapeText(weight));
    }
    const int64_t out = weight[1 - in_dimension];
    RETURN_IF_ERROR(CheckVector("bias", op.bias, out));
    return ValueShape{in.rows, out};
  }

  absl::StatusOr<ValueShape> operator()(const NormOp& op) {
    const ValueShape& in = Shape(op.input);
    const bool rms = op.kind == NormKind::kRms;
    RETURN_IF_ERROR(CheckEpsilon("epsilon", op.epsilon));
    RETURN_IF_ERROR(CheckVector("weight", op.weight, in.columns));
    RETURN_IF_ERROR(CheckVector("bias", op.bias, in.columns));
    if (rms && op.bias.has_value()) return WrongField(Field("bias"), "none of an RMS norm", "one");
    RETURN_IF_ERROR(FieldIsFinite(Field("weight_offset"), op.weight_offset));
    if (op.weight_offset != 0 && !op.weight.has_value()) {
      return WrongField(Field("weight_offset"), "0 without a weight", op.weight_offset);
    }
    if (op.round_before_weight && (!rms || !op.weight.has_value())) {
      return WrongField(Field("round_before_weight"), "an RMS norm with a weight", "another");
    }
    return in;
  }

  absl::StatusOr<ValueShape> operator()(const AttentionOp& op) {
    RETURN_IF_ERROR(CheckHeads("q", op.q));
    RETURN_IF_ERROR(CheckHeads("k", op.k));
    RETURN_IF_ERROR(CheckHeads("v", op.v));
    RETURN_IF_ERROR(CheckHeadCounts(op));
    if (Shape(op.q.value).rows != RowKind::kInput) {
      return WrongField(Field("q.value"), "a value with x's rows", "the memory's");
    }
    const bool is_cross = Shape(op.k.value).rows == RowKind::kMemory;
    if ((Shape(op.v.value).rows == RowKind::kMemory) != is_cross) {
      return WrongField(Field("v.value"), "the rows of k", "others");
    }
    RETURN_IF_ERROR(CheckVector("q_norm", op.q_norm, op.q.dim));
    RETURN_IF_ERROR(CheckVector("k_norm", op.k_norm, op.k.dim));
    RETURN_IF_ERROR(CheckAttentionOptions(op, is_cross, op_path_));
    return ValueShape{RowKind::kInput, op.q.heads * op.v.dim};
  }

  absl::StatusOr<ValueShape> operator()(const ActivationOp& op) { return Shape(op.input); }

  absl::StatusOr<ValueShape> operator()(const BinaryOp& op) {
    const ValueShape &a = Shape(op.a), &b = Shape(op.b);
    if (a.rows != b.rows) return WrongField(Field("b"), "the rows of a", "others");
    if (a.columns != b.columns) {
      return WrongField(Field("b"), absl::StrCat(a.columns, " columns as a"), b.columns);
    }
    RETURN_IF_ERROR(FieldIsFinite(Field("b_scale"), op.b_scale));
    return a;
  }

  absl::StatusOr<ValueShape> operator()(const DropoutOp& op) {
    RETURN_IF_ERROR(FieldInRange(Field("p · 256"), op.threshold, 0, 255));
    const ValueShape& in = Shape(op.input);  // the memory's rows have no place in a micro-batch
    if (in.rows == RowKind::kInput) return in;
    return WrongField(Field("input"), "a value with x's rows", "the memory's");
  }

 private:
  const ValueShape& Shape(int64_t value) const { return shapes_.values[value]; }
  std::string Field(absl::string_view name) const { return absl::StrCat(path_, ".", name); }

  // That values are there before they are read, and parameters at all and once.
  absl::Status CheckUses(const ModuleOp& op) {
    const int64_t values = static_cast<int64_t>(shapes_.values.size());
    for (const ValueUse& use : ValuesOf(op)) {
      RETURN_IF_ERROR(FieldInRange(Field(use.field), use.value, 0, values - 1));
      if (use.value == kMemoryValue && layout_.memory_width == 0) {
        return WrongField(Field(use.field), "another value than 1, since memory_width is 0", 1);
      }
      used_values_[use.value] = true;
    }
    const int64_t parameters = static_cast<int64_t>(block_.parameters.size());
    for (const ParameterUse& use : ParametersOf(op)) {
      RETURN_IF_ERROR(FieldInRange(Field(use.field), use.parameter, 0, parameters - 1));
      if (used_parameters_[use.parameter]) {
        return WrongField(Field(use.field), "a parameter that no other op or field uses",
                          use.parameter);
      }
      used_parameters_[use.parameter] = true;
    }
    return absl::OkStatus();
  }

  absl::Status CheckVector(absl::string_view field, const std::optional<int64_t>& parameter,
                           int64_t elements) const {
    if (!parameter.has_value()) return absl::OkStatus();
    const std::vector<int64_t>& shape = block_.parameters[*parameter].shape;
    if (shape.size() == 1 && shape[0] == elements) return absl::OkStatus();
    return WrongField(Field(field), absl::StrCat("[", elements, "]"), ShapeText(shape));
  }

  absl::Status CheckEpsilon(absl::string_view field, float epsilon) const {
    if (std::isfinite(epsilon) && epsilon > 0) return absl::OkStatus();
    return WrongField(Field(field), "a finite number above 0", epsilon);
  }

  absl::Status CheckHeads(absl::string_view name, const HeadColumns& heads) const {
    const std::string path = Field(name);
    RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".heads"), heads.heads, 1, kMaxOpHeads));
    RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".dim"), heads.dim, 1, kMaxHeadDim));
    const int64_t columns = Shape(heads.value).columns;
    if (heads.columns() > columns) {
      return WrongField(path, absl::StrCat("heads · dim of at most ", columns, " columns"),
                        heads.columns());
    }
    return FieldInRange(absl::StrCat(path, ".first_column"), heads.first_column, 0,
                        columns - heads.columns());
  }

  absl::Status CheckHeadCounts(const AttentionOp& op) const {
    if (op.q.heads % op.k.heads != 0) {
      return WrongField(Field("k.heads"), absl::StrCat("a divisor of q.heads = ", op.q.heads),
                        op.k.heads);
    }
    if (op.v.heads != op.k.heads) return WrongField(Field("v.heads"), op.k.heads, op.v.heads);
    if (op.k.dim != op.q.dim) return WrongField(Field("k.dim"), op.q.dim, op.k.dim);
    const bool has_norm = op.q_norm.has_value() || op.k_norm.has_value();
    if (has_norm) RETURN_IF_ERROR(CheckEpsilon("qk_norm_epsilon", op.qk_norm_epsilon));
    RETURN_IF_ERROR(FieldIsFinite(Field("qk_norm_weight_offset"), op.qk_norm_weight_offset));
    const bool has_options =
        op.qk_norm_epsilon != 0 || op.qk_norm_weight_offset != 0 || op.qk_norm_round_before_weight;
    if (has_options && !has_norm) {
      return WrongField(path_, "no options of qk_norm without q_norm and k_norm", "some");
    }
    return absl::OkStatus();
  }

  absl::Status CheckOutput() const {
    const ValueShape& out = shapes_.values.back();
    const std::string path = absl::StrCat(block_path_, ".op[", block_.ops.size() - 1, "]");
    if (out.rows != RowKind::kInput) return WrongField(path, "x's rows", "the memory's");
    if (out.columns == layout_.width) return absl::OkStatus();
    return WrongField(path, absl::StrCat("width = ", layout_.width, " columns"), out.columns);
  }

  absl::Status CheckAllIsUsed() const {
    for (size_t n = 0; n + 1 < used_values_.size(); ++n) {
      if (used_values_[n] || n == kMemoryValue) continue;
      return WrongField(n == kInputValue
                            ? block_path_
                            : absl::StrCat(block_path_, ".op[", n - kFirstOpValue, "]"),
                        "a value that a later op uses", absl::StrCat("value ", n, " unused"));
    }
    for (size_t n = 0; n < used_parameters_.size(); ++n) {
      if (used_parameters_[n]) continue;
      return WrongField(absl::StrCat(block_path_, ".parameter[", n, "]"),
                        "a parameter that an op uses", "none");
    }
    return absl::OkStatus();
  }

  const ModuleLayout& layout_;
  const ModuleBlock& block_;
  const std::string block_path_;
  std::string op_path_, path_;  // of the op at hand: "block[0].op[3]", "block[0].op[3].linear"
  std::vector<bool> used_values_, used_parameters_;
  BlockShapes shapes_;
};

}  // namespace

absl::StatusOr<BlockShapes> CheckBlock(const ModuleLayout& layout, int64_t block) {
  return BlockCheck(layout, block).Run();
}

}  // namespace attnd
