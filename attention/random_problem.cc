#include "attention/random_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "attention/masks/mask_description.h"
#include "attention/masks/random_mask.h"
#include "attention/problem_text.h"
#include "base/check.h"

namespace attnd {

uint64_t Random::Bits() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

int64_t Random::Between(int64_t low, int64_t high) {
  const uint64_t count = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;  // 0: 2^64
  const uint64_t bits = Bits();
  return static_cast<int64_t>(static_cast<uint64_t>(low) + (count == 0 ? bits : bits % count));
}

double Random::Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }

// The sum of four 16-bit draws: bell-shaped, and the same on every machine, unlike log and cos.
double Random::Normal() {
  uint64_t bits = Bits();
  double sum = 0;
  for (int n = 0; n < 4; ++n) sum += static_cast<double>((bits >> (16 * n)) & 0xffff);
  return (sum * 0x1p-16 - 2 + 0x1p-15) * std::numbers::sqrt3;
}

AlignedBytes::AlignedBytes(int64_t size) : size_(size) {
  void* memory = ::operator new (static_cast<size_t>(size), std::align_val_t{64});
  std::memset(memory, 0, static_cast<size_t>(size));
  data_.reset(static_cast<std::byte*>(memory));
}

AlignedBytes Unwritten(int64_t size) {
  AlignedBytes tensor(size);
  std::fill_n(tensor.data(), size, std::byte{0xff});
  return tensor;
}

namespace {

template <class T, size_t kCount>
T OneOf(Random& random, const T (&choices)[kCount]) {
  return choices[random.Between(0, kCount - 1)];
}

int64_t RandomHeadDim(Random& random, int64_t most) {
  static constexpr int64_t kUsual[] = {1, 8, 16, 32, 40, 64, 80, 96, 128, 192, 256};
  int64_t dim = random.Chance(0.5) ? OneOf(random, kUsual) : random.Between(1, kMaxHeadDim);
  return std::min(dim, most);
}

// A length in 1..most, often one that sits at the edge of a tile.
int64_t RandomLength(Random& random, int64_t most) {
  static constexpr int64_t kEdges[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  int64_t length = random.Chance(0.5) ? OneOf(random, kEdges) : random.Between(1, 150);
  return std::clamp<int64_t>(length, 1, most);
}

void DrawSizes(Random& random, const RandomProblemLimits& limits, Problem& p) {
  p.element = static_cast<ElementType>(random.Between(1, 3));
  p.layout = static_cast<Layout>(random.Between(1, 4));
  int64_t left = std::max<int64_t>(1, limits.max_pairs);
  p.batch = random.Between(1, std::min<int64_t>(3, left));
  left /= p.batch;
  p.kv_heads = random.Between(1, std::min<int64_t>(3, left));
  p.q_heads = p.kv_heads * random.Between(1, std::min<int64_t>(4, left / p.kv_heads));
  left /= p.q_heads;
  p.q_len = RandomLength(random, left);
  p.kv_len =
      random.Chance(0.3) ? std::min(p.q_len, left / p.q_len) : RandomLength(random, left / p.q_len);
  p.qk_head_dim = RandomHeadDim(random, limits.max_head_dim);
  p.v_head_dim = random.Chance(0.6) ? p.qk_head_dim : RandomHeadDim(random, limits.max_head_dim);
}

// Cuts `total` into `parts` lengths, some of them empty.
std::vector<int32_t> RandomCuts(Random& random, int64_t parts, int64_t total) {
  std::vector<int32_t> cuts = {0};
  for (int64_t n = 1; n < parts; ++n) {
    cuts.push_back(random.Chance(0.2) ? cuts[random.Between(0, n - 1)]
                                      : static_cast<int32_t>(random.Between(0, total)));
  }
  cuts.push_back(static_cast<int32_t>(total));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

void DrawLengths(Random& random, Problem& p) {
  if (IsPacked(p.layout)) {
    p.cu_seqlens_q = RandomCuts(random, p.batch, p.q_len);
    p.cu_seqlens_k = p.q_len == p.kv_len ? p.cu_seqlens_q : RandomCuts(random, p.batch, p.kv_len);
  } else if (random.Chance(0.3)) {
    for (int64_t b = 0; b < p.batch; ++b) {
      p.kv_lengths.push_back(random.Chance(0.2) ? 0 : random.Between(0, p.kv_len));
    }
  }
}

void DrawDiagonal(Random& random, Problem& p) {
  p.causal = random.Chance(0.4);
  if (random.Chance(0.3)) {
    p.window_left = random.Between(-1, p.kv_len / 2);
    p.window_right = random.Between(-1, p.kv_len / 2);
  }
  if (random.Chance(0.2)) {
    int64_t slopes = random.Chance(0.5) ? p.q_heads : p.batch * p.q_heads;
    for (int64_t n = 0; n < slopes; ++n) {
      p.alibi_slopes.push_back(static_cast<float>(random.Between(-2, 8)) / 16);
    }
  }
  p.alignment = static_cast<Alignment>(random.Between(0, 3));
  if (p.alignment == Alignment::kUnspecified && !Validate(p).ok()) {
    p.alignment = Alignment::kBottomRight;
  }
  if (p.alignment != Alignment::kOffsets) return;
  int64_t count = random.Chance(0.5) ? 1 : p.batch;
  for (int64_t n = 0; n < count; ++n) {
    p.offsets.push_back(static_cast<int32_t>(random.Between(-p.q_len, p.kv_len)));
  }
}

BroadcastShape RandomShape(Random& random, const Problem& p) {
  auto full_or_one = [&](int64_t full) { return random.Chance(0.5) ? full : 1; };
  return {full_or_one(p.batch), full_or_one(p.q_heads), full_or_one(p.MaxQueryLength()),
          full_or_one(p.MaxKeyLength())};
}

void DrawScores(Random& random, Problem& p) {
  static constexpr float kScales[] = {0.0f, -0.25f, 0.125f, 1.0f, 0.7f};
  if (random.Chance(0.4)) p.scale = OneOf(random, kScales);
  static constexpr float kCaps[] = {0.5f, 5.0f, 30.0f, 50.0f};
  if (random.Chance(0.2)) p.softcap = OneOf(random, kCaps);
  if (random.Chance(0.3)) p.bool_mask = BoolMask{RandomShape(random, p)};
  if (random.Chance(0.3)) {
    p.bias = Bias{static_cast<ElementType>(random.Between(1, 3)), RandomShape(random, p),
                  random.Chance(0.6)};
  }
}

void DrawSoftmax(Random& random, Problem& p) {
  if (random.Chance(0.2)) {
    p.denominator = DenominatorKind::kZeroRest;
  } else if (random.Chance(0.25)) {
    p.denominator = DenominatorKind::kSink;
    for (int64_t h = 0; h < p.q_heads; ++h) {
      p.sink_logits.push_back(static_cast<float>(2 * random.Normal()));
    }
  }
  static constexpr uint32_t kThresholds[] = {1, 26, 128, 200, 255};
  if (random.Chance(0.3)) {
    p.dropout = {OneOf(random, kThresholds), random.Bits(), random.Bits()};
  }
  if (random.Chance(0.2)) {
    p.shard = {random.Between(0, 5), random.Between(0, 5), 0};
    if (random.Chance(0.5)) {
      p.shard.total_q_heads = p.shard.q_head_offset + p.q_heads + random.Between(0, 5);
    }
  }
  if (random.Chance(0.1)) p.accumulate = AccumulateType::kFloat16;
  p.allow_nondeterministic = random.Chance(0.1);
}

// Rows that see nothing are no error.
void DrawMask(Random& random, Problem& p) {
  p.bool_mask.reset();
  MaskSpec spec = RandomMaskFor(
      [&](int64_t low, int64_t high) { return random.Between(low, high); }, MaskCallOf(p));
  spec.empty_row = EmptyRow::kZero;
  const auto mask = MaskDescription::Make(spec, MaskCallOf(p));
  CHECK(mask.ok()) << mask.status().ToString();
  p.mask = *mask;
  p.mask_origin = spec.origin;
  if (p.alignment == Alignment::kUnspecified && !Validate(p).ok()) {
    p.alignment = Alignment::kTopLeft;
  }
}

}  // namespace

Problem PlainProblem(int64_t batch, int64_t heads, int64_t length, int64_t head_dim) {
  Problem p;
  p.batch = batch;
  p.q_heads = p.kv_heads = heads;
  p.q_len = p.kv_len = length;
  p.qk_head_dim = p.v_head_dim = head_dim;
  return p;
}

Problem RandomProblem(uint64_t seed, const RandomProblemLimits& limits) {
  Random random(seed);
  Problem p;
  DrawSizes(random, limits, p);
  DrawLengths(random, p);
  DrawDiagonal(random, p);
  DrawScores(random, p);
  DrawSoftmax(random, p);
  if (limits.masks) DrawMask(random, p);
  absl::Status status = Validate(p);
  CHECK(status.ok()) << status.ToString() << " seed " << seed << ": " << ProblemText(p);
  return p;
}

namespace {

AlignedBytes RandomTensor(Random& random, ElementType type, int64_t count, Values values,
                          double factor = 1) {
  AlignedBytes tensor(count * ElementBytes(type));
  for (int64_t n = 0; n < count; ++n) {
    double value = values == Values::kUniform ? random.Uniform() : random.Normal();
    StoreElement(type, tensor.data(), n, static_cast<float>(value * factor));
  }
  return tensor;
}

// A tensor whose rows differ in magnitude by powers of 4 up to `largest`, so that some logits reach
// ±largest² · scale · dim and others stay small.
AlignedBytes HugeTensor(Random& random, ElementType type, int64_t count, int64_t dim,
                        double largest) {
  AlignedBytes tensor(count * ElementBytes(type));
  double magnitude = largest;
  for (int64_t n = 0; n < count; ++n) {
    if (n % dim == 0) magnitude = largest / static_cast<double>(1 << 2 * random.Between(0, 4));
    double value = (random.Chance(0.5) ? magnitude : -magnitude) * (0.5 + random.Uniform() / 2);
    StoreElement(type, tensor.data(), n, static_cast<float>(value));
  }
  return tensor;
}

// Hides or shows some blocks of 64 rows × 32 keys as a whole, which kernels leave out or run plain.
void DrawBlocks(Random& random, const BroadcastShape& shape, int64_t row_bytes, std::byte* bits) {
  const int64_t rows = shape.batch * shape.heads * shape.rows;
  for (int64_t row = 0; row < rows; row += 64) {
    for (int64_t byte = 0; byte < row_bytes; byte += 4) {
      const bool shows = random.Chance(0.5);
      if (!random.Chance(0.3)) continue;
      for (int64_t i = row; i < std::min(row + 64, rows); ++i) {
        for (int64_t n = byte; n < std::min(byte + 4, row_bytes); ++n) {
          bits[i * row_bytes + n] = shows ? std::byte{0xff} : std::byte{0};
        }
      }
    }
  }
}

AlignedBytes RandomMask(Random& random, const BoolMask& mask) {
  AlignedBytes bits(mask.bytes());
  int64_t rows = mask.shape.batch * mask.shape.heads * mask.shape.rows;
  for (int64_t row = 0; row < rows; ++row) {
    if (random.Chance(0.1)) continue;  // a row that attends to nothing
    for (int64_t n = 0; n < mask.row_bytes(); ++n) {
      bits.data()[row * mask.row_bytes() + n] =
          static_cast<std::byte>(random.Bits() | random.Bits());
    }
  }
  if (mask.shape.columns > 64) DrawBlocks(random, mask.shape, mask.row_bytes(), bits.data());
  return bits;
}

AlignedBytes RandomBias(Random& random, const Bias& bias) {
  AlignedBytes tensor = RandomTensor(random, bias.element, bias.shape.elements(), Values::kNormal);
  for (int64_t n = 0; n < bias.shape.elements(); ++n) {
    if (random.Chance(1.0 / 16)) {
      StoreElement(bias.element, tensor.data(), n, -std::numeric_limits<float>::infinity());
    }
  }
  return tensor;
}

}  // namespace

ProblemInputs RandomInputs(const Problem& p, uint64_t seed, Values values) {
  Random random(seed);
  ProblemInputs in;
  if (values == Values::kHuge) {
    double scale = std::max(std::fabs(static_cast<double>(p.ResolvedScale())), 1e-3);
    double largest = std::sqrt(6e4 / (static_cast<double>(p.qk_head_dim) * scale));
    in.q = HugeTensor(random, p.element, p.QueryElements(), p.qk_head_dim, largest);
    in.k = HugeTensor(random, p.element, p.KeyElements(), p.qk_head_dim, largest);
    values = Values::kNormal;
  } else {
    in.q = RandomTensor(random, p.element, p.QueryElements(), values);
    in.k = RandomTensor(random, p.element, p.KeyElements(), values);
  }
  in.v = RandomTensor(random, p.element, p.ValueElements(), values);
  if (p.bool_mask) in.mask_bits = RandomMask(random, *p.bool_mask);
  if (p.bias) in.bias = RandomBias(random, *p.bias);
  double factor = 1;
  if (values == Values::kLargeGradients) factor = p.element == ElementType::kFloat16 ? 2048 : 1e6;
  in.d_o = RandomTensor(random, p.element, p.OutputElements(), values, factor);
  in.d_lse = RandomTensor(random, ElementType::kFloat32, p.LseElements(), values, factor);
  return in;
}

}  // namespace attnd
