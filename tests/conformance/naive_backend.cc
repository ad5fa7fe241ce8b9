#include "tests/conformance/naive_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "attention/dropout.h"
#include "attention/masks/mask_description.h"
#include "attention/masks/mask_oracle.h"
#include "attention/problem.h"
#include "attention/tensor_view.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Both directions read these.
struct Tensors {
  std::vector<float> q, k, v;
  const uint8_t* mask_bits;
  const void* bias;
};

std::vector<float> ToFloats(ElementType element, const void* data, int64_t count) {
  std::vector<float> values(count);
  for (int64_t n = 0; n < count; ++n) values[n] = LoadElement(element, data, n);
  return values;
}

template <class Call>
Tensors TensorsOf(const Call& call) {
  const Problem& p = *call.problem;
  return {ToFloats(p.element, call.q, p.QueryElements()),
          ToFloats(p.element, call.k, p.KeyElements()),
          ToFloats(p.element, call.v, p.ValueElements()), call.mask_bits, call.bias};
}

// Backward reads these besides.
struct Residuals {
  std::vector<float> o, d_o;
  const float *lse, *d_lse;
};

float Dot(const float* a, const float* b, int64_t count) {
  float sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

void AddScaled(float factor, const float* from, int64_t count, float* to) {
  for (int64_t d = 0; d < count; ++d) to[d] += factor * from[d];
}

struct Row {
  std::vector<bool> visible;
  std::vector<float> product, score, z;
  bool any = false;
};

// Head: one (batch entry, query head) of a call.
class Head {
 public:
  Head(const Problem& p, const Tensors& t, int64_t b, int64_t h, Mistake mistake, bool rounds)
      : p_(p), t_(t), b_(b), h_(h), mistake_(mistake), rounds_(rounds), s_(p.SequenceAt(b)) {
    kv_head_ = Is(Mistake::kWrongKvHead) ? h % p.kv_heads : p.KvHead(h);
    if (Is(Mistake::kSwappedAlignment)) {
      if (p.alignment == Alignment::kTopLeft) s_.offset = s_.kv_len - s_.q_len;
      if (p.alignment == Alignment::kBottomRight) s_.offset = 0;
    }
    if (Is(Mistake::kOneOffsetForAll)) s_.offset = p.SequenceAt(0).offset;
    if (Is(Mistake::kKeyLengthIgnored) && !IsPacked(p.layout)) s_.kv_len = p.kv_len;
    if (Is(Mistake::kNeighbourSequence) && s_.kv_begin + s_.kv_len < p.kv_len) ++s_.kv_len;
    if (p.mask != nullptr && !Is(Mistake::kMaskForgotten)) PlaceMask();
  }

  // The oracle refers to this object's members.
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  void PlaceMask() {
    spec_ = p_.mask->spec();
    spec_.origin = Is(Mistake::kMaskOriginIgnored) ? MaskOrigin() : p_.mask_origin;
    if (Is(Mistake::kMaskOriginSwapped)) std::swap(spec_.origin.row_begin, spec_.origin.key_begin);
    mask_call_ = MaskCallOf(p_);
    if (Is(Mistake::kMaskWithoutAlignment)) mask_call_.offsets = {0};
    if (Is(Mistake::kMaskOfFirstOffset)) mask_call_.offsets.resize(1);
    mask_.emplace(spec_, mask_call_);
  }

  bool MaskShows(int64_t i, int64_t j) const {
    const int64_t b = Is(Mistake::kMaskOfFirstEntry) ? 0 : b_;
    int64_t h = h_;
    if (Is(Mistake::kMaskOfFirstHead)) h = 0;
    if (Is(Mistake::kMaskOfKvHead)) h = h_ / p_.group_size() * p_.group_size();
    if (Is(Mistake::kMaskOfEntryNumber)) h = b_;
    if (Is(Mistake::kMaskNeighbourKey)) j = std::min(j + 1, s_.kv_len - 1);
    if (Is(Mistake::kMaskTransposed) && i < s_.kv_len && j < s_.q_len) std::swap(i, j);
    if (Is(Mistake::kMaskRemainder) && !RemainderIsPhase(i, j)) return false;
    if (Is(Mistake::kMaskListsMoved) && !std::holds_alternative<MaskExpr>(spec_.pattern[0])) {
      i += s_.offset;
      if (i < 0 || i >= s_.q_len) return false;
    }
    return mask_->IsVisible(b, h, i, j);
  }

  // Computes a mask that is a stride.
  bool RemainderIsPhase(int64_t i, int64_t j) const {
    const auto* expr = std::get_if<MaskExpr>(&spec_.pattern[0]);
    const auto* stride = expr == nullptr ? nullptr : std::get_if<StrideRel>(&expr->op);
    return stride == nullptr || (i + s_.offset - j) % stride->p == stride->phase;
  }

  const Sequence& sequence() const { return s_; }
  bool Is(Mistake mistake) const { return mistake_ == mistake; }

  int64_t QueryRow(int64_t i) const { return QueryStrides(p_).Row(b_, h_, s_.q_begin + i); }
  int64_t OutputRow(int64_t i) const { return OutputStrides(p_).Row(b_, h_, s_.q_begin + i); }
  int64_t KeyRow(int64_t j) const { return KeyStrides(p_).Row(b_, kv_head_, s_.kv_begin + j); }
  int64_t ValueRow(int64_t j) const { return ValueStrides(p_).Row(b_, kv_head_, s_.kv_begin + j); }

  // As a matrix unit's operand would be stored.
  float Operand(float value) const {
    if (!rounds_) return value;
    char stored[4];
    StoreElement(p_.element, stored, 0, value);
    return LoadElement(p_.element, stored, 0);
  }

  bool Visible(int64_t i, int64_t j) const {
    int64_t from_diagonal = j - i - s_.offset;
    if (p_.causal && from_diagonal > Is(Mistake::kCausalOffByOne)) return false;
    if (p_.window_left >= 0 && -from_diagonal > p_.window_left + Is(Mistake::kWindowLeftOffByOne)) {
      return false;
    }
    if (p_.window_right >= 0 &&
        from_diagonal > p_.window_right + Is(Mistake::kWindowRightOffByOne)) {
      return false;
    }
    if (mask_.has_value() && !MaskShows(i, j)) return false;
    int64_t bit = Is(Mistake::kMaskOffByOne) ? std::min(j + 1, s_.kv_len - 1) : j;
    if (p_.bool_mask && !MaskBit(*p_.bool_mask, t_.mask_bits, b_, h_, i, bit)) return false;
    return Bias(i, j) != -kInfinity;
  }

  float Bias(int64_t i, int64_t j) const {
    if (!p_.bias) return 0;
    return LoadElement(p_.bias->element, t_.bias, BroadcastIndex(p_.bias->shape, b_, h_, i, j));
  }

  Row Scores(int64_t i, bool with_dropout) const {
    Row row{std::vector<bool>(s_.kv_len), std::vector<float>(s_.kv_len),
            std::vector<float>(s_.kv_len), std::vector<float>(s_.kv_len)};
    for (int64_t j = 0; j < s_.kv_len; ++j) {
      row.visible[j] = Visible(i, j);
      if (!row.visible[j]) continue;
      row.any = true;
      float dot = Dot(&t_.q[QueryRow(i)], &t_.k[KeyRow(j)], p_.qk_head_dim);
      row.product[j] = Is(Mistake::kScaleAfterSoftmax) ? dot : dot * p_.ResolvedScale();
      row.score[j] = Score(i, j, row.product[j]);
      row.z[j] = with_dropout ? DropoutFactor(i, j) : 1;
    }
    return row;
  }

  void Forward(int64_t i, void* o, float* lse) const {
    Row row = Scores(i, true);
    int64_t at = p_.LseIndex(b_, h_, s_, i);
    if (!row.any && Is(Mistake::kUnwrittenEmptyRow)) return;
    std::vector<float> sum(p_.v_head_dim);
    float most = Most(row), denominator = Denominator(row, most);
    for (int64_t j = 0; j < s_.kv_len; ++j) {
      bool uniform = !row.any && Is(Mistake::kUniformEmptyRow);
      bool leak = Is(Mistake::kNanLeak);
      if (!row.visible[j] && !uniform && !leak) continue;
      float weight = row.visible[j] ? Operand(std::exp(row.score[j] - most)) * row.z[j] : 0;
      if (Is(Mistake::kNoRescale) && j < s_.kv_len / 2) {
        weight *= std::exp(most - std::max(MostOf(row, 0, s_.kv_len / 2), -1e30f));
      }
      if (uniform) weight = 1.0f / static_cast<float>(s_.kv_len);
      AddScaled(weight, &t_.v[ValueRow(j)], p_.v_head_dim, sum.data());
    }
    float factor = Is(Mistake::kScaleAfterSoftmax) ? p_.ResolvedScale() : 1;
    for (int64_t d = 0; d < p_.v_head_dim; ++d) {
      float value = row.any ? sum[d] / denominator * factor : sum[d];
      if (Is(Mistake::kNanSwallowed) && std::isnan(value)) value = 0;
      StoreElement(p_.element, o, OutputRow(i) + d, value);
    }
    lse[at] = row.any ? Lse(most, denominator) : -kInfinity;
  }

  // Gradients of one row; sums of dK, dV and the rest go to float32 arrays of the tensors' shapes.
  struct Sums {
    std::vector<float> d_k, d_v, d_sink;
    std::vector<float> d_bias;  // of this head alone: [rows or 1, columns or 1]
  };
  void Backward(int64_t i, const Residuals& residuals, void* d_q_out, Sums& sums) const {
    Row row = Scores(i, !Is(Mistake::kDropoutNotReplayed));
    std::vector<float> d_q(p_.qk_head_dim);
    if (row.any) AddRow(i, row, residuals, sums, d_q);
    if (!row.any && Is(Mistake::kUnwrittenEmptyRow)) return;
    for (int64_t d = 0; d < p_.qk_head_dim; ++d) {
      StoreElement(p_.element, d_q_out, QueryRow(i) + d, d_q[d]);
    }
  }

 private:
  float Score(int64_t i, int64_t j, float product) const {
    float bias = Bias(i, j);
    if (Is(Mistake::kBiasBeforeSoftcap)) product += bias;
    float score = p_.softcap > 0 ? p_.softcap * std::tanh(product / p_.softcap) : product;
    if (!Is(Mistake::kBiasBeforeSoftcap)) score += bias;
    float distance = static_cast<float>(i + s_.offset - j);
    if (!Is(Mistake::kAlibiOneSided)) distance = std::fabs(distance);
    if (!p_.alibi_slopes.empty()) score -= p_.AlibiSlope(b_, h_) * distance;
    return Is(Mistake::kHalfScores) ? FloatFromFloat16(Float16FromFloat(score)) : score;
  }

  float DropoutFactor(int64_t i, int64_t j) const {
    if (p_.dropout.threshold == 0) return 1;
    uint32_t index = Is(Mistake::kShardIgnored) ? static_cast<uint32_t>(b_ * p_.q_heads + h_)
                                                : p_.DropoutHeadIndex(b_, h_);
    DropoutStream stream = MakeDropoutStream(p_.dropout.seed, p_.dropout.offset, index);
    if (DropoutByte(stream, static_cast<uint32_t>(i), static_cast<uint32_t>(j)) <
        p_.dropout.threshold) {
      return 0;
    }
    return Is(Mistake::kDropoutUnscaled) ? 1 : DropoutScale(p_.dropout.threshold);
  }

  static float MostOf(const Row& row, int64_t begin, int64_t end) {
    float most = -kInfinity;
    for (int64_t j = begin; j < end; ++j) {
      if (row.visible[j]) most = std::fmax(most, row.score[j]);
    }
    return most;
  }

  int64_t RestCount(const Row& row) const {
    if (p_.denominator != DenominatorKind::kZeroRest || Is(Mistake::kZeroRestIgnored)) return 0;
    const int64_t padding = Is(Mistake::kPaddingIsRest) ? p_.kv_len - s_.kv_len : 0;
    return padding + std::count(row.visible.begin(), row.visible.end(), false);
  }

  float Most(const Row& row) const {
    float most = MostOf(row, 0, s_.kv_len);
    if (p_.denominator == DenominatorKind::kSink) most = std::fmax(most, p_.sink_logits[h_]);
    return RestCount(row) > 0 ? std::fmax(most, 0.0f) : most;
  }

  float Denominator(const Row& row, float most) const {
    float sum = 0;
    for (int64_t j = 0; j < s_.kv_len; ++j) {
      if (row.visible[j]) sum += std::exp(row.score[j] - most);
    }
    if (int64_t rest = RestCount(row); rest > 0) sum += static_cast<float>(rest) * std::exp(-most);
    if (p_.denominator == DenominatorKind::kSink) sum += std::exp(p_.sink_logits[h_] - most);
    return sum;
  }

  float Lse(float most, float denominator) const {
    if (Is(Mistake::kMaxForLse)) return most;
    if (Is(Mistake::kSinkNotInLse) && p_.denominator == DenominatorKind::kSink) {
      denominator -= std::exp(p_.sink_logits[h_] - most);
    }
    return most + std::log(denominator);
  }

  void AddRow(int64_t i, const Row& row, const Residuals& r, Sums& sums,
              std::vector<float>& d_q) const {
    int64_t at = p_.LseIndex(b_, h_, s_, i);
    float delta = Dot(&r.d_o[OutputRow(i)], &r.o[OutputRow(i)], p_.v_head_dim);
    if (r.d_lse != nullptr && !Is(Mistake::kLseGradientIgnored)) delta -= r.d_lse[at];
    if (Is(Mistake::kDeltaIgnored)) delta = 0;
    for (int64_t j = 0; j < s_.kv_len; ++j) {
      if (row.visible[j]) AddScore(i, j, row, r, delta, sums, d_q);
    }
    if (p_.denominator == DenominatorKind::kSink) {
      sums.d_sink[b_ * p_.q_heads + h_] -= std::exp(p_.sink_logits[h_] - r.lse[at]) * delta;
    }
  }

  void AddScore(int64_t i, int64_t j, const Row& row, const Residuals& r, float delta, Sums& sums,
                std::vector<float>& d_q) const {
    const float* d_o = &r.d_o[OutputRow(i)];
    float lse = r.lse[p_.LseIndex(b_, h_, s_, i)];
    if (Is(Mistake::kOwnLse)) lse = Lse(Most(row), Denominator(row, Most(row)));
    float p = std::exp(row.score[j] - lse);
    float d_s = p * (Dot(d_o, &t_.v[ValueRow(j)], p_.v_head_dim) * row.z[j] - delta);
    if (!sums.d_bias.empty()) {
      const BroadcastShape& shape = p_.bias->shape;
      float& sum = sums.d_bias[BroadcastIndex({1, 1, shape.rows, shape.columns}, 0, 0, i, j)];
      sum = Is(Mistake::kBiasGradientOverwritten) ? d_s : sum + d_s;
    }
    float t = p_.softcap > 0 ? std::tanh(row.product[j] / p_.softcap) : 0;
    if (Is(Mistake::kNoSoftcapSlope)) t = 0;
    float d_x = Operand(d_s * (1 - t * t)), scale = p_.ResolvedScale();
    AddScaled(Operand(p * row.z[j]), d_o, p_.v_head_dim, &sums.d_v[ValueRow(j)]);
    AddScaled(d_x * scale, &t_.k[KeyRow(j)], p_.qk_head_dim, d_q.data());
    AddScaled(d_x * (Is(Mistake::kUnscaledDk) ? 1 : scale), &t_.q[QueryRow(i)], p_.qk_head_dim,
              &sums.d_k[KeyRow(j)]);
  }

  const Problem& p_;
  const Tensors& t_;
  int64_t b_, h_;
  Mistake mistake_;
  bool rounds_;
  MaskSpec spec_;
  MaskCall mask_call_;
  std::optional<MaskOracle> mask_;
  Sequence s_;
  int64_t kv_head_;
};

void StoreAll(ElementType element, const std::vector<float>& values, void* to) {
  for (size_t n = 0; n < values.size(); ++n) {
    StoreElement(element, to, static_cast<int64_t>(n), values[n]);
  }
}

}  // namespace

NaiveBackend::NaiveBackend(Mistake mistake, bool rounds_operands)
    : mistake_(mistake), rounds_operands_(rounds_operands) {
  info_.backend = "naive";
}

absl::Status NaiveBackend::Supports(const Problem&, Direction) const { return absl::OkStatus(); }

int64_t NaiveBackend::WorkspaceBytes(const Problem&, Direction) const { return 0; }

absl::StatusOr<LaunchReport> NaiveBackend::Forward(absl::Span<const ForwardCall> calls) {
  for (const ForwardCall& call : calls) {
    const Problem& p = *call.problem;
    Tensors tensors = TensorsOf(call);
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.q_heads; ++h) {
        Head head(p, tensors, b, h, mistake_, rounds_operands_);
        for (int64_t i = 0; i < head.sequence().q_len; ++i) head.Forward(i, call.o, call.lse);
      }
    }
    if (mistake_ == Mistake::kWritesBehindEnd) {
      StoreElement(p.element, call.o, p.OutputElements(), 0);
    }
    if (mistake_ == Mistake::kDependsOnBatch && calls.size() > 1) {
      call.lse[0] = std::nextafter(call.lse[0], 0.0f);
    }
  }
  return LaunchReport{.kernel = "naive_forward_f32"};
}

namespace {

void AddTo(const float* addend, int64_t count, bool first, float* sum) {
  for (int64_t n = 0; n < count; ++n) sum[n] = first ? addend[n] : sum[n] + addend[n];
}

// Adds a head's bias gradient in the contract's order: to its batch entry's sum, and that to the
// total when the entry's last head is done.
void AddBiasGradient(const Problem& p, int64_t b, int64_t h, Mistake mistake,
                     const std::vector<float>& share, std::vector<float>& entry, float* total) {
  const BroadcastShape& shape = p.bias->shape;
  int64_t count = static_cast<int64_t>(share.size());
  int64_t head = shape.heads == 1 ? 0 : h;
  float* of_entry = total + (shape.batch == 1 ? 0 : b) * shape.heads * count;
  if (mistake == Mistake::kBiasGradientOrder) {
    bool first = (b == 0 || shape.batch != 1) && (h == 0 || shape.heads != 1);
    return AddTo(share.data(), count, first, of_entry + head * count);
  }
  entry.resize(shape.heads * count);
  AddTo(share.data(), count, h == 0 || shape.heads != 1, &entry[head * count]);
  if (h != p.q_heads - 1) return;
  AddTo(entry.data(), shape.heads * count, b == 0 || shape.batch != 1, of_entry);
}

void BackwardOne(const BackwardCall& call, Mistake mistake, bool rounds_operands) {
  const Problem& p = *call.problem;
  Tensors tensors = TensorsOf(call);
  Residuals residuals{ToFloats(p.element, call.o, p.OutputElements()),
                      ToFloats(p.element, call.d_o, p.OutputElements()), call.lse, call.d_lse};
  Head::Sums sums{std::vector<float>(p.KeyElements()),
                  std::vector<float>(p.ValueElements()),
                  std::vector<float>(p.batch * p.q_heads),
                  {}};
  bool wants_bias = p.bias && p.bias->want_gradient;
  std::vector<float> entry;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.q_heads; ++h) {
      if (mistake == Mistake::kGroupOverwritten && b == 0 && h == p.q_heads - 1) {
        std::fill(sums.d_k.begin(), sums.d_k.end(), 0.0f);
      }
      if (wants_bias) sums.d_bias.assign(p.bias->shape.rows * p.bias->shape.columns, 0.0f);
      Head head(p, tensors, b, h, mistake, rounds_operands);
      for (int64_t i = 0; i < head.sequence().q_len; ++i) {
        head.Backward(i, residuals, call.d_q, sums);
      }
      if (wants_bias) AddBiasGradient(p, b, h, mistake, sums.d_bias, entry, call.d_bias);
    }
  }
  StoreAll(p.element, sums.d_k, call.d_k);
  StoreAll(p.element, sums.d_v, call.d_v);
  if (call.d_sink != nullptr) {  // not a layer's, whose sinks are constants
    StoreAll(ElementType::kFloat32, sums.d_sink, call.d_sink);
  }
}

}  // namespace

absl::StatusOr<LaunchReport> NaiveBackend::Backward(absl::Span<const BackwardCall> calls) {
  for (const BackwardCall& call : calls) BackwardOne(call, mistake_, rounds_operands_);
  return LaunchReport{.kernel = "naive_backward_f32"};
}

}  // namespace attnd
