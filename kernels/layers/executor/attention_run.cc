#include "kernels/layers/executor/attention_run.h"

#include "base/check.h"
#include "base/status_macros.h"
#include "modules/attention_problem.h"

namespace attnd {

struct AttentionRun::Side {
  const HeadColumns& heads;
  const std::optional<int64_t>& norm;
  std::byte* gathered;  // scratch
  std::byte* turned;
};

AttentionRun::AttentionRun(const InstanceTensors& module, const InstanceCall& call, int64_t layer,
                           int64_t op, const LayerValues& values)
    : module_(module),
      call_(call),
      layer_(layer),
      number_(op),
      values_(values),
      op_(std::get<AttentionOp>(module.graph().BlockOf(layer).ops[op].kind)),
      shapes_(module.graph().ShapesOf(layer)) {
  const AttentionScratch& sizes = module.attention();
  std::byte* next = module.attention_scratch();
  const auto take = [&next](int64_t bytes) {
    std::byte* place = next;
    next += bytes;
    return place;
  };
  scratch_.q = take(sizes.q);
  scratch_.k = take(sizes.k);
  scratch_.v = take(sizes.v);
  scratch_.o = take(sizes.o);
  scratch_.d_o = take(sizes.d_o);
  scratch_.lse = reinterpret_cast<float*>(take(sizes.lse));
  scratch_.workspace = take(sizes.workspace);
}

int64_t AttentionRun::RowsOf(const HeadColumns& heads) const {
  return call_.rows.RowsOf(shapes_.values[heads.value].rows);
}

void AttentionRun::Copy(const HeadColumns& heads, std::byte* to) const {
  const Tensor& value = values_.values[heads.value];
  const ColumnRange from{shapes_.values[heads.value].columns, heads.first_column};
  module_.device().CopyColumns(value, from, {to, module_.element()}, {heads.columns(), 0}, false,
                               RowsOf(heads), heads.columns());
}

const void* AttentionRun::Gathered(const HeadColumns& heads, std::byte* scratch) const {
  const Tensor& value = values_.values[heads.value];
  const bool lies_so = heads.columns() == shapes_.values[heads.value].columns &&
                       value.element == module_.element() &&
                       reinterpret_cast<uintptr_t>(value.data) % kTensorAlignment == 0;
  if (lies_so) return value.data;
  Copy(heads, scratch);
  return scratch;
}

AttentionRun::Heads AttentionRun::HeadsOf(const HeadColumns& heads, std::byte* scratch) const {
  const Tensor& value = values_.values[heads.value];
  const int64_t columns = shapes_.values[heads.value].columns;
  const int64_t chunk = module_.device().AttendedChunk();
  const auto is_whole = [chunk](int64_t numbers) { return numbers % chunk == 0; };
  const bool lies_so = chunk > 0 && heads.columns() < columns &&
                       value.element == module_.element() &&
                       reinterpret_cast<uintptr_t>(value.data) % kTensorAlignment == 0 &&
                       is_whole(columns) && is_whole(heads.first_column) && is_whole(heads.dim);
  if (!lies_so) return {Gathered(heads, scratch)};
  return {static_cast<const std::byte*>(value.data) +
              heads.first_column * ElementBytes(module_.element()),
          columns * ElementBytes(module_.element()) / 2};
}

const void* AttentionRun::InElement(ConstTensor tensor, int64_t rows, int64_t columns,
                                    std::byte* scratch) const {
  if (tensor.element == module_.element()) return tensor.data;
  module_.device().CopyColumns(tensor, {columns, 0}, {scratch, module_.element()}, {columns, 0},
                               false, rows, columns);
  return scratch;
}

AttentionRun::Side AttentionRun::QuerySide(std::byte* turned) const {
  return {op_.q, op_.q_norm, scratch_.q, turned};
}
AttentionRun::Side AttentionRun::KeySide(std::byte* turned) const {
  return {op_.k, op_.k_norm, scratch_.k, turned};
}

NormOperands AttentionRun::NormOf(const Side& side) const {
  NormOperands norm{.count = side.heads.dim,
                    .epsilon = op_.qk_norm_epsilon,
                    .weight_offset = op_.qk_norm_weight_offset,
                    .weight = module_.Weight(layer_, *side.norm)};
  if (op_.qk_norm_round_before_weight) norm.round_before_weight = module_.element();
  norm.x = {Gathered(side.heads, side.gathered), module_.element()};
  return norm;
}

void AttentionRun::Rotate(const Side& side, bool is_forward, std::byte* heads) const {
  if (!op_.rotary.has_value()) return;
  const TurnDirection direction = is_forward ? TurnDirection::kForward : TurnDirection::kBackward;
  module_.device().Turn(*op_.rotary, direction,
                        {.heads = {heads, module_.element()},
                         .rows = RowsOf(side.heads),
                         .head_count = side.heads.heads,
                         .dim = side.heads.dim,
                         .positions = &call_.positions});
}

AttentionRun::Heads AttentionRun::TurnForward(const Side& side) const {
  if (!side.norm.has_value() && !op_.rotary.has_value()) {
    return HeadsOf(side.heads, side.gathered);
  }
  if (side.norm.has_value()) {
    module_.device().Norm(NormOf(side), {side.turned, module_.element()},
                          RowsOf(side.heads) * side.heads.heads);
  } else {
    Copy(side.heads, side.turned);
  }
  Rotate(side, true, side.turned);
  return {side.turned};
}

std::byte* AttentionRun::TurnBackward(const Side& side, std::byte* d_heads, bool adds) const {
  Rotate(side, false, d_heads);
  if (!side.norm.has_value()) return d_heads;
  const NormOperands norm = NormOf(side);
  const ConstTensor dy{d_heads, module_.element()};
  auto* statistics = reinterpret_cast<NormStatistics*>(module_.statistics());
  const int64_t vectors = RowsOf(side.heads) * side.heads.heads;
  module_.device().NormBackward(norm, dy, {side.turned, module_.element()}, false, statistics,
                                vectors);
  float* d_weight = adds ? module_.Gradient(layer_, side.norm) : nullptr;
  if (d_weight != nullptr) {
    module_.device().AddNormGradients(norm, {.dy = dy,
                                             .statistics = statistics,
                                             .vectors = vectors,
                                             .per_row = side.heads.heads,
                                             .d_weight = d_weight});
  }
  return side.turned;
}

absl::StatusOr<Problem> AttentionRun::MakeProblem() const {
  return ProblemOf(module_.graph(), layer_, number_, call_.rows, call_.dropout);
}

absl::Status AttentionRun::Forward(const TurnedBuffers& turned) const {
  ASSIGN_OR_RETURN(const Problem problem, MakeProblem());
  ModuleDevice& device = module_.device();
  RETURN_IF_ERROR(device.Supports(problem, Direction::kForward));
  CHECK(device.AttentionBytes(OneSequence(problem), Direction::kForward) <=
        module_.attention().workspace);
  const Tensor& out = values_.values[number_ + kFirstOpValue];
  const bool is_in_place = out.element == module_.element();
  float* lse = values_.lse[number_];
  const Heads q = TurnForward(QuerySide(turned.q)), k = TurnForward(KeySide(turned.k));
  const Heads v = HeadsOf(op_.v, scratch_.v);
  const ForwardCall call{.problem = &problem,
                         .q = q.data,
                         .k = k.data,
                         .v = v.data,
                         .mask_bits = problem.bool_mask ? call_.mask_bits.data() : nullptr,
                         .o = is_in_place ? out.data : scratch_.o,
                         .lse = lse != nullptr ? lse : scratch_.lse,
                         .workspace = scratch_.workspace,
                         .stop = call_.stop,
                         .strides = {q.stride, k.stride, v.stride}};
  RETURN_IF_ERROR(device.Attend(call));
  if (is_in_place) return absl::OkStatus();
  const int64_t columns = op_.q.heads * op_.v.dim;
  device.CopyColumns({scratch_.o, module_.element()}, {columns, 0}, out, {columns, 0}, false,
                     call_.rows.rows(), columns);
  return absl::OkStatus();
}

absl::Status AttentionRun::Backward(const TurnedBuffers& turned, ConstTensor d_o, bool adds,
                                    HeadGradients& gradients) const {
  ASSIGN_OR_RETURN(const Problem problem, MakeProblem());
  ModuleDevice& device = module_.device();
  RETURN_IF_ERROR(device.Supports(problem, Direction::kBackward));
  CHECK(device.AttentionBytes(OneSequence(problem), Direction::kBackward) <=
        module_.attention().workspace);
  const Side of_q = QuerySide(turned.q), of_k = KeySide(turned.k);
  const Heads q = TurnForward(of_q), k = TurnForward(of_k), v = HeadsOf(op_.v, scratch_.v);
  const int64_t rows = call_.rows.rows(), columns = op_.q.heads * op_.v.dim;
  const BackwardCall call{
      .problem = &problem,
      .q = q.data,
      .k = k.data,
      .v = v.data,
      .mask_bits = problem.bool_mask ? call_.mask_bits.data() : nullptr,
      .o = InElement(values_.values[number_ + kFirstOpValue], rows, columns, scratch_.o),
      .lse = values_.lse[number_],
      .d_o = InElement(d_o, rows, columns, scratch_.d_o),
      .d_q = gradients.q,
      .d_k = gradients.k,
      .d_v = gradients.v,
      .workspace = scratch_.workspace,
      .stop = call_.stop,
      .strides = {q.stride, k.stride, v.stride},
      .d_strides = gradients.strides};
  RETURN_IF_ERROR(device.AttendBackward(call));
  gradients.q = TurnBackward(of_q, gradients.q, adds);
  gradients.k = TurnBackward(of_k, gradients.k, adds);
  return absl::OkStatus();
}

}  // namespace attnd
