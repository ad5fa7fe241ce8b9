// Pointwise operations of CudaDevice: of vectors, of numbers, and of both in a segment.
#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/dropout.h"
#include "base/check.h"
#include "base/round_up.h"
#include "kernels/dense/listed_params.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "kernels/layers/cuda/dense_tensors.h"

namespace attnd {
namespace {

constexpr int64_t kTurnedRows = int64_t{1} << 15;

// Appends what steps read and write.
void AppendTensors(absl::Span<const NumbersStep> steps, std::vector<DenseTensor>& tensors) {
  for (const NumbersStep& step : steps) {
    tensors.push_back(step.other);
    tensors.push_back(step.out);
  }
}

int32_t WholeElementOf(const NumbersDesc& d) {
  if (d.rows == 1) return WholeElement({d.a, d.b, d.out}, {d.columns});
  return WholeElement({d.a, d.b, d.out}, {d.columns, d.a_stride, d.out_stride});
}

int32_t WholeElementOf(const ChainDesc& d, absl::Span<const NumbersStep> steps) {
  std::vector<DenseTensor> tensors = {d.in};
  AppendTensors(steps, tensors);
  return WholeElement(tensors, {d.columns});
}

int32_t WholeElementOf(const NormDesc& d, absl::Span<const NumbersStep> steps) {
  std::vector<DenseTensor> tensors = {d.x, d.dy, d.out, d.in};
  AppendTensors(steps, tensors);
  const int32_t element = WholeElement(tensors, {d.count});
  const auto are_floats = [](const DenseTensor& t) {
    return t.data == nullptr ||
           (t.element == kBiasFloat32 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0);
  };
  const bool rounds_so = d.round_element == kBiasNone || d.round_element == element;
  return are_floats(d.weight) && are_floats(d.bias) && rounds_so ? element
                                                                 : static_cast<int32_t>(kBiasNone);
}

NormDesc NormDescOf(const NormOperands& norm, int64_t vectors) {
  return {.x = TensorOf(norm.x),
          .weight = TensorOf(norm.weight),
          .bias = TensorOf(norm.bias),
          .vectors = vectors,
          .count = static_cast<int32_t>(norm.count),
          .is_centred = norm.is_centred,
          .round_element = norm.round_before_weight.has_value()
                               ? cuda::BiasCode(*norm.round_before_weight)
                               : static_cast<int32_t>(kBiasNone),
          .epsilon = norm.epsilon,
          .weight_offset = norm.weight_offset};
}

}  // namespace

// ---- Vectors.

void CudaDevice::Norm(const NormOperands& norm, Tensor y, int64_t vectors) {
  NormDesc desc = NormDescOf(norm, vectors);
  desc.out = TensorOf(y);
  AddNorm(desc);
}

void CudaDevice::NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                              NormStatistics* statistics, int64_t vectors) {
  static_assert(sizeof(NormStatistics) == sizeof(DenseStatistics));
  NormDesc desc = NormDescOf(norm, vectors);
  desc.dy = TensorOf(dy);
  desc.out = TensorOf(dx);
  desc.statistics = reinterpret_cast<DenseStatistics*>(statistics);
  desc.is_backward = 1;
  desc.add = add;
  AddNorm(desc);
}

void CudaDevice::AddNorm(NormDesc desc, absl::Span<const NumbersStep> steps) {
  if (segment_.has_value()) {
    segment_->links.push_back(desc);
    return;
  }
  BeforeNorm(desc);
  desc.whole = WholeElementOf(desc, steps);
  const double work = 1 + desc.is_backward + static_cast<double>(steps.size());
  const KernelKind kind =
      desc.whole == kBiasNone ? KernelKind::kDenseAnyNorm : KernelKind::kDenseNorm;
  desc.lanes = NormLanes(desc.count, desc.vectors);
  queue_.Add(kind, desc, DivideUp(desc.vectors * desc.lanes, kNormThreads),
             8.0 * work * static_cast<double>(desc.vectors) * desc.count);
}

void CudaDevice::BeforeNorm(const NormDesc& desc) {
  BeforeWriting(desc.out, desc.vectors * desc.count);
  if (desc.is_backward == 0) return;
  BeforeWriting(
      ByteRange::At(desc.statistics, desc.vectors * static_cast<int64_t>(sizeof(DenseStatistics))));
}

void CudaDevice::AddNormGradients(const NormOperands& norm, const NormGradients& gradients) {
  const NormDesc of = NormDescOf(norm, gradients.vectors);
  AddSums({.in = TensorOf(gradients.dy),
           .operand = TensorOf(gradients.dy).element,
           .columns = of.count,
           .rows = gradients.vectors,
           .block_rows = kGradientBlockRows * gradients.per_row,
           .sums = gradients.d_bias,
           .weight_sums = gradients.d_weight,
           .x = of.x,
           .statistics = reinterpret_cast<const DenseStatistics*>(gradients.statistics),
           .round_element = of.round_element},
          8.0 * gradients.vectors * of.count);
}

void CudaDevice::Turn(const Rotary& rotary, TurnDirection direction, const RotaryHeads& heads) {
  const auto count = static_cast<int64_t>(rotary.inverse_frequency.size());
  const int64_t row_numbers = heads.head_count * heads.dim;
  BeforeWriting(TensorOf(heads.heads), heads.rows * row_numbers);
  for (int64_t first = 0; first < heads.rows; first += kTurnedRows) {
    const int64_t rows = std::min(kTurnedRows, heads.rows - first);
    // Frequencies, then positions.
    std::vector<std::byte> constants((count + rows) * 4);
    std::memcpy(constants.data(), rotary.inverse_frequency.data(), count * 4);
    std::memcpy(constants.data() + count * 4, heads.positions->data() + first, rows * 4);
    const auto* at = static_cast<const float*>(
        queue_.Constants(constants.data(), static_cast<int64_t>(constants.size())));
    const RotaryDesc desc = {.heads = Behind(TensorOf(heads.heads), first * row_numbers),
                             .positions = reinterpret_cast<const uint32_t*>(at + count),
                             .frequency = at,
                             .rows = rows,
                             .head_count = static_cast<int32_t>(heads.head_count),
                             .dim = static_cast<int32_t>(heads.dim),
                             .count = static_cast<int32_t>(count),
                             .is_interleaved = rotary.interleaved,
                             .is_backward = direction == TurnDirection::kBackward,
                             .factor = rotary.attention_factor};
    queue_.Add(KernelKind::kDenseRotary, desc, DivideUp(rows * count, kRotaryThreads),
               8.0 * rows * row_numbers);
  }
}

// ---- Numbers.

// In launches of at most kMostNumbers numbers: rows of one launch, or of one long row a part.
void CudaDevice::AddNumbers(NumbersDesc desc) {
  if (segment_.has_value()) {
    segment_->links.push_back(desc);
    return;
  }
  // Copies read gradients too.
  BeforeReading(desc.a,
                desc.rows == 1 ? desc.columns : (desc.rows - 1) * desc.a_stride + desc.columns);
  BeforeWriting(desc.out,
                desc.rows == 1 ? desc.columns : (desc.rows - 1) * desc.out_stride + desc.columns);
  const auto cut = [&](int64_t rows, int64_t columns, int64_t a_next, int64_t out_next) {
    NumbersDesc part = desc;
    part.rows = rows;
    part.columns = columns;
    part.passes = NumbersPasses(rows, columns);
    part.whole = WholeElementOf(part);
    queue_.Add(KernelKind::kDenseNumbers, part, NumbersBlocks(rows, columns),
               8.0 * static_cast<double>(rows * columns));
    desc.a = Behind(desc.a, a_next);
    desc.b = Behind(desc.b, a_next);
    desc.out = Behind(desc.out, out_next);
    desc.rule.first_row += static_cast<uint32_t>(rows);
  };
  if (desc.rows == 1) {
    for (int64_t left = desc.columns; left > 0; left -= kMostNumbers) {
      const int64_t columns = std::min(left, kMostNumbers);
      cut(1, columns, columns, columns);
    }
    return;
  }
  const int64_t most = std::max<int64_t>(1, kMostNumbers / std::max<int64_t>(desc.columns, 1));
  for (int64_t left = desc.rows; left > 0; left -= most) {
    const int64_t rows = std::min(left, most);
    cut(rows, desc.columns, rows * desc.a_stride, rows * desc.out_stride);
  }
}

void CudaDevice::ApplyCurve(Curve curve, ConstTensor x, Tensor y, int64_t count) {
  NumbersDesc desc = NumbersOf(kNumbersCurve, x, y, count);
  desc.rule.curve = static_cast<int32_t>(curve);
  AddNumbers(desc);
}

void CudaDevice::ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                                 int64_t count) {
  NumbersDesc desc = NumbersOf(kNumbersSlope, x, dx, count);
  desc.b = TensorOf(dy);
  desc.rule.curve = static_cast<int32_t>(curve);
  desc.add = add;
  AddNumbers(desc);
}

void CudaDevice::Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out,
                         bool add, int64_t count) {
  const NumbersOp op = kind == Combination::kScaled ? kNumbersScaled
                       : kind == Combination::kSum  ? kNumbersSum
                                                    : kNumbersProduct;
  NumbersDesc desc = NumbersOf(op, a, out, count);
  if (kind != Combination::kScaled) desc.b = TensorOf(b);
  desc.rule.scale = scale;
  desc.add = add;
  AddNumbers(desc);
}

void CudaDevice::Drop(const DropoutRule& rule, ConstTensor in, Tensor out, bool add, int64_t rows,
                      int64_t columns) {
  const DropoutStream stream = MakeDropoutStream(rule.seed, rule.offset, 0);
  NumbersDesc desc = NumbersOf(kNumbersDrop, in, out, columns);
  desc.rows = rows;
  desc.a_stride = desc.out_stride = columns;
  desc.add = add;
  desc.rule.scale = rule.threshold == 0 ? 1 : DropoutScale(rule.threshold);
  desc.rule.key_lo = stream.key_lo;
  desc.rule.key_hi = stream.key_hi;
  desc.rule.offset_lo = stream.offset_lo;
  desc.rule.first_row = static_cast<uint32_t>(rule.first_row);
  desc.rule.threshold = rule.threshold;
  AddNumbers(desc);
}

void CudaDevice::CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out,
                             const ColumnRange& to, bool add, int64_t rows, int64_t count) {
  NumbersDesc desc = NumbersOf(kNumbersCopy, in, out, count);
  desc.a = Behind(desc.a, from.first);
  desc.out = Behind(desc.out, to.first);
  desc.rows = rows;
  desc.a_stride = from.stride;
  desc.out_stride = to.stride;
  desc.add = add;
  AddNumbers(desc);
}

// ---- Segments.

void CudaDevice::BeginSegment(absl::Span<const void* const> unread) {
  CHECK(!segment_.has_value());
  segment_.emplace().unread.assign(unread.begin(), unread.end());
}

// Sums of columns read what the chain was made of or has written; nothing in it writes over that.
void CudaDevice::EndSegment() {
  OpenSegment segment = *std::exchange(segment_, std::nullopt);
  if (segment.product.has_value()) {
    auto& [product, operand] = *segment.product;
    if (KernelOf(product, operand).kind != KernelKind::kDenseProduct &&
        JoinCurve(segment.links, segment.unread, operand, product.product)) {
      segment.links.clear();
    }
    AddProduct(product, operand);
  }
  const std::optional<JoinedChain> joined =
      segment.links.size() > 1 ? JoinLinks(segment.links, segment.unread) : std::nullopt;
  if (joined.has_value()) {
    AddJoined(*joined, segment.sums);
  } else {
    for (const ChainLink& link : segment.links) {
      if (const auto* norm = std::get_if<NormDesc>(&link)) {
        AddNorm(*norm);
      } else {
        AddNumbers(std::get<NumbersDesc>(link));
      }
    }
  }
  for (const auto& [desc, flops] : segment.sums) AddSums(desc, flops);
}

void CudaDevice::AddJoined(const JoinedChain& joined, Sums& sums) {
  std::vector<NumbersStep> steps = joined.before;
  steps.insert(steps.end(), joined.after.begin(), joined.after.end());
  // Before the steps are among the constants of the next launch.
  const int64_t numbers = joined.chain.rows * joined.chain.columns;
  if (joined.norm.has_value()) BeforeNorm(*joined.norm);
  for (const NumbersStep& step : steps) BeforeWriting(step.out, numbers);
  const auto brought = std::find_if(sums.begin(), sums.end(), [&](const Sums::value_type& of) {
    return joined.norm.has_value() && joined.before.empty() &&
           BringsSums(*joined.norm, steps, of.first);
  });
  if (brought != sums.end()) {
    for (const float* to : {brought->first.sums, brought->first.weight_sums}) {
      BeforeWriting(ByteRange::At(to, int64_t{4} * brought->first.columns));
    }
  }
  const auto* at = static_cast<const NumbersStep*>(
      queue_.Constants(steps.data(), static_cast<int64_t>(steps.size() * sizeof(steps[0]))));
  if (joined.norm.has_value()) {
    NormDesc norm = *joined.norm;
    norm.before = {at, static_cast<int32_t>(joined.before.size())};
    norm.after = {at + joined.before.size(), static_cast<int32_t>(joined.after.size())};
    if (brought == sums.end()) return AddNorm(norm, steps);
    const ColumnSumsDesc of = brought->first;
    sums.erase(brought);
    return AddNormSums(norm, of);
  }
  ChainDesc chain = joined.chain;
  chain.steps = at;
  chain.count = static_cast<int32_t>(joined.before.size());
  chain.passes = NumbersPasses(chain.rows, chain.columns);
  chain.whole = WholeElementOf(chain, steps);
  queue_.Add(KernelKind::kDenseChain, chain, NumbersBlocks(chain.rows, chain.columns),
             8.0 * chain.count * static_cast<double>(chain.rows * chain.columns));
}

// Launches apart take less time where there is no block for each multiprocessor.
bool CudaDevice::BringsSums(const NormDesc& norm, absl::Span<const NumbersStep> steps,
                            const ColumnSumsDesc& sums) const {
  const bool are_of_it = sums.sums != nullptr && sums.weight_sums != nullptr &&
                         sums.in.data == norm.dy.data && sums.x.data == norm.x.data &&
                         sums.statistics == norm.statistics && sums.rows == norm.vectors;
  const int64_t blocks = norm.vectors / kSumStretch;
  return are_of_it && norm.is_backward != 0 && queue_.Has(KernelKind::kDenseNormSums) &&
         WholeElementOf(norm, steps) == kBiasFloat16 && norm.count >= kNormSumsMinColumns &&
         norm.count <= kNormSumsColumns && norm.vectors % kSumStretch == 0 &&
         blocks >= engine_.device().multiprocessors() &&
         2 * 4 * blocks * norm.count <= LaunchQueue::kNormSumsBytes &&
         sums.operand == sums.in.element && sums.round_element == norm.round_element &&
         sums.block_rows == kGradientBlockRows;
}

void CudaDevice::AddNormSums(const NormDesc& norm, const ColumnSumsDesc& sums) {
  static_assert(kStretchesOfBlock == kGradientBlockRows / kSumStretch);
  const int64_t stretches = norm.vectors / kSumStretch, numbers = stretches * norm.count;
  float* const left = queue_.norm_sums();
  queue_.Add(KernelKind::kDenseNormSums, NormSumsDesc{norm, left, left + numbers}, stretches,
             8.0 * (4 + norm.after.count) * static_cast<double>(norm.vectors) * norm.count);
  const StretchSumsDesc desc = {.sums = left,
                                .weight_sums = left + numbers,
                                .to = sums.sums,
                                .to_weight = sums.weight_sums,
                                .stretches = static_cast<int32_t>(stretches),
                                .count = norm.count};
  queue_.Add(KernelKind::kDenseStretchSums, desc, 2 * DivideUp(int64_t{norm.count}, int64_t{32}),
             8.0 * static_cast<double>(numbers));
}

}  // namespace attnd
