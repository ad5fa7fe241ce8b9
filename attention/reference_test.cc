// The oracle itself is proved three ways: finite differences of its own forward pass, closed forms
// worked out by hand, and identities of attention that no implementation mistake shares.
#include "attention/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "attention/tensor_view.h"

namespace attnd {
namespace {

constexpr double kDoubleInfinity = std::numeric_limits<double>::infinity();
constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

ReferenceTensors TensorsOf(const ProblemInputs& in) {
  return {in.q.data(), in.k.data(), in.v.data(), in.mask_bits.as<uint8_t>(), in.bias.data()};
}

Problem Small(int64_t q_len, int64_t kv_len, int64_t dim) {
  return {.batch = 1,
          .q_heads = 1,
          .kv_heads = 1,
          .q_len = q_len,
          .kv_len = kv_len,
          .qk_head_dim = dim,
          .v_head_dim = dim};
}

ReferenceOutputs RunForward(const Problem& p, const ProblemInputs& in) {
  return Reference(p, TensorsOf(in)).Forward();
}

ReferenceGradients RunBackward(const Problem& p, const ProblemInputs& in) {
  return Reference(p, TensorsOf(in)).Backward(in.d_o.data(), in.d_lse.as<float>());
}

// ---- Finite differences.

constexpr double kStep = 0x1p-9;

// Numbers become multiples of kStep, so that adding a step is exact in float32.
void RoundToSteps(AlignedBytes& tensor) {
  float* values = tensor.as<float>();
  for (int64_t n = 0; n < tensor.size() / 4; ++n) {
    if (std::isfinite(values[n])) values[n] = std::round(values[n] / kStep) * kStep;
  }
}

// The scalar whose gradient backward computes: Σ dO·O + Σ dlse·lse over rows that see a key.
double Loss(const Problem& p, const ProblemInputs& in) {
  ReferenceOutputs out = RunForward(p, in);
  double loss = 0;
  for (size_t n = 0; n < out.o.size(); ++n) loss += in.d_o.as<float>()[n] * out.o[n];
  for (size_t n = 0; n < out.lse.size(); ++n) {
    if (out.lse[n] != -kDoubleInfinity) loss += in.d_lse.as<float>()[n] * out.lse[n];
  }
  return loss;
}

// Fourth-order central difference of Loss along *value.
double Slope(const Problem& p, const ProblemInputs& in, float* value) {
  float original = *value;
  auto at = [&](int steps) {
    *value = original + steps * static_cast<float>(kStep);
    return Loss(p, in);
  };
  double slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
  *value = original;
  return slope;
}

void ExpectSlopes(const char* tensor, const Problem& p, const ProblemInputs& in, float* values,
                  const std::vector<double>& gradient) {
  for (size_t n = 0; n < gradient.size(); ++n) {
    if (!std::isfinite(values[n])) {
      ASSERT_EQ(gradient[n], 0) << tensor << "[" << n << "]: a masking bias";
      continue;
    }
    double slope = Slope(p, in, &values[n]);
    ASSERT_NEAR(gradient[n], slope, 2e-6 * (1 + std::fabs(slope)))
        << tensor << "[" << n << "] " << ProblemText(p);
  }
}

void ExpectGradientsAreSlopes(Problem p, uint64_t seed) {
  p.element = ElementType::kFloat32;
  if (p.bias) p.bias->element = ElementType::kFloat32;
  if (p.bias) p.bias->want_gradient = true;
  if (p.dropout.threshold > 200) p.dropout.threshold = 200;  // a scale of 256 makes slopes steep
  ProblemInputs in = RandomInputs(p, seed);
  for (AlignedBytes* tensor : {&in.q, &in.k, &in.v, &in.bias}) RoundToSteps(*tensor);
  for (float& logit : p.sink_logits) logit = std::round(logit / kStep) * kStep;
  ReferenceGradients g = RunBackward(p, in);
  ExpectSlopes("q", p, in, in.q.as<float>(), g.d_q);
  ExpectSlopes("k", p, in, in.k.as<float>(), g.d_k);
  ExpectSlopes("v", p, in, in.v.as<float>(), g.d_v);
  ExpectSlopes("bias", p, in, in.bias.as<float>(), g.d_bias);
  std::vector<double> d_sink(p.sink_logits.size());
  for (size_t n = 0; n < g.d_sink.size(); ++n) d_sink[n % p.q_heads] += g.d_sink[n];
  ExpectSlopes("sink", p, in, p.sink_logits.data(), d_sink);
}

TEST(ReferenceBackward, EqualsFiniteDifferencesForRandomProblems) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 60, .max_head_dim = 3});
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    ExpectGradientsAreSlopes(p, seed);
    if (HasFatalFailure()) return;
  }
}

TEST(ReferenceBackward, EqualsFiniteDifferencesWithEveryOptionAtOnce) {
  Problem p = Small(4, 6, 3);
  p.batch = 2;
  p.q_heads = 2;
  p.v_head_dim = 2;
  p.causal = true;
  p.window_left = 4;
  p.alignment = Alignment::kBottomRight;
  p.kv_lengths = {6, 5};
  p.softcap = 1.5f;
  p.scale = -0.8f;
  p.bool_mask = BoolMask{{1, 2, 4, 6}};
  p.bias = Bias{ElementType::kFloat32, {1, 2, 1, 6}, true};
  p.alibi_slopes = {0.5f, 0.25f};
  p.dropout = {64, 11, 12};
  for (DenominatorKind kind :
       {DenominatorKind::kSoftmax, DenominatorKind::kZeroRest, DenominatorKind::kSink}) {
    p.denominator = kind;
    p.sink_logits.assign(kind == DenominatorKind::kSink ? 2 : 0, 0.5f);
    ExpectGradientsAreSlopes(p, 3);
  }
}

// ---- Closed forms.

TEST(ReferenceForward, IsThePaperExampleByHand) {
  // One row, two keys, scale 1/sqrt(4): scores 1 and 0, so P = (e, 1) / (e + 1).
  Problem p = Small(1, 2, 4);
  float q[] = {2, 0, 0, 0}, k[] = {1, 0, 0, 0, 0, 1, 0, 0}, v[] = {1, 0, 0, 0, 0, 1, 0, 0};
  ReferenceOutputs out = Reference(p, {q, k, v}).Forward();
  double e = std::exp(1.0);
  EXPECT_DOUBLE_EQ(out.o[0], e / (e + 1));
  EXPECT_DOUBLE_EQ(out.o[1], 1 / (e + 1));
  EXPECT_DOUBLE_EQ(out.lse[0], std::log(e + 1));  // not the row maximum, 1
}

TEST(ReferenceForward, GivesOneWhenEachValueIsOne) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 400});
    p.dropout = {};
    p.denominator = DenominatorKind::kSoftmax;
    p.sink_logits.clear();
    ProblemInputs in = RandomInputs(p, seed);
    for (int64_t n = 0; n < p.ValueElements(); ++n) StoreElement(p.element, in.v.data(), n, 1);
    ReferenceOutputs out = RunForward(p, in);
    for (size_t n = 0; n < out.o.size(); ++n) {
      if (out.o[n] != 0) {
        ASSERT_NEAR(out.o[n], 1, 1e-12) << "seed " << seed;
      }
    }
  }
}

// With V the identity, O is P∘Z itself.
ProblemInputs WithIdentityValues(const Problem& p, uint64_t seed) {
  ProblemInputs in = RandomInputs(p, seed);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      for (int64_t j = 0; j < p.kv_len; ++j) {
        for (int64_t d = 0; d < p.v_head_dim; ++d) {
          StoreElement(p.element, in.v.data(), ValueStrides(p).Row(b, h, j) + d, d == j);
        }
      }
    }
  }
  return in;
}

TEST(ReferenceForward, ReadsProbabilitiesThatAreExpOfScoreMinusLse) {
  Problem p = Small(5, 7, 7);
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  ProblemInputs in = WithIdentityValues(p, 1);
  Reference reference(p, TensorsOf(in));
  ReferenceOutputs out = reference.Forward();
  for (int64_t i = 0; i < 5; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 7; ++j) {
      double score = 0;
      for (int64_t d = 0; d < 7; ++d) {
        score += reference.q()[i * 7 + d] * reference.k()[j * 7 + d] * double{p.ResolvedScale()};
      }
      double expected = j <= i + 2 ? std::exp(score - out.lse[i]) : 0;
      EXPECT_NEAR(out.o[i * 7 + j], expected, 1e-14);
      sum += out.o[i * 7 + j];
    }
    EXPECT_NEAR(sum, 1, 1e-14);
  }
}

TEST(ReferenceForward, ShiftsLseAloneWhenAVectorIsAddedToEachKey) {
  Problem p = Small(4, 6, 3);
  ProblemInputs in = RandomInputs(p, 2), shifted = RandomInputs(p, 2);
  const float u[] = {0.5f, -1.0f, 2.0f};
  for (AlignedBytes* k : {&in.k, &shifted.k}) RoundToSteps(*k);
  for (int64_t n = 0; n < 18; ++n) shifted.k.as<float>()[n] += u[n % 3];
  ReferenceOutputs a = RunForward(p, in), b = RunForward(p, shifted);
  for (int64_t i = 0; i < 4; ++i) {
    double product = 0;
    for (int64_t d = 0; d < 3; ++d) product += double{in.q.as<float>()[i * 3 + d]} * u[d];
    EXPECT_NEAR(b.lse[i] - a.lse[i], double{p.ResolvedScale()} * product, 1e-13);
    for (int64_t d = 0; d < 3; ++d) EXPECT_NEAR(a.o[i * 3 + d], b.o[i * 3 + d], 1e-13);
  }
}

TEST(ReferenceForward, GivesZeroAndMinusInfinityWhenRowIsFullyMasked) {
  for (DenominatorKind kind :
       {DenominatorKind::kSoftmax, DenominatorKind::kZeroRest, DenominatorKind::kSink}) {
    Problem p = Small(5, 3, 2);  // bottom right: rows 0 and 1 see nothing
    p.causal = true;
    p.alignment = Alignment::kBottomRight;
    p.denominator = kind;
    if (kind == DenominatorKind::kSink) p.sink_logits = {1};
    ProblemInputs in = RandomInputs(p, 4);
    ReferenceOutputs out = RunForward(p, in);
    ReferenceGradients g = RunBackward(p, in);
    for (int64_t n = 0; n < 4; ++n) {
      EXPECT_EQ(out.o[n], 0);
      EXPECT_EQ(g.d_q[n], 0);
    }
    EXPECT_EQ(out.lse[0], -kDoubleInfinity);
    EXPECT_EQ(out.lse[1], -kDoubleInfinity);
    EXPECT_TRUE(std::isfinite(out.lse[2]));
  }
}

TEST(ReferenceForward, CountsMissingKeysAsLogitZeroWithZeroRest) {
  // The identity L' = ln(e^L + rest), O' = O·e^(L − L') against a plain softmax over the same keys.
  // Padding is no rest.
  for (int32_t keys : {9, 6}) {
    Problem plain = Small(9, 9, 4);
    plain.window_left = plain.window_right = 2;
    plain.alignment = Alignment::kTopLeft;
    plain.kv_lengths = {keys};
    Problem rest = plain;
    rest.denominator = DenominatorKind::kZeroRest;
    ProblemInputs in = RandomInputs(plain, 5);
    ReferenceOutputs a = RunForward(plain, in), b = RunForward(rest, in);
    for (int64_t i = 0; i < std::min(9, keys + 2); ++i) {  // the last row sees none of six
      int64_t visible = std::min<int64_t>(keys - 1, i + 2) - std::max<int64_t>(0, i - 2) + 1;
      double lse = std::log(std::exp(a.lse[i]) + static_cast<double>(keys - visible));
      EXPECT_NEAR(b.lse[i], lse, 1e-13);
      for (int64_t d = 0; d < 4; ++d) {
        EXPECT_NEAR(b.o[i * 4 + d], a.o[i * 4 + d] * std::exp(a.lse[i] - lse), 1e-13);
      }
    }
  }
}

TEST(ReferenceForward, TreatsASinkAsAKeyWithValueZero) {
  Problem with_key = Small(3, 5, 4);
  ProblemInputs in = RandomInputs(with_key, 6);
  for (int64_t d = 0; d < 4; ++d) in.k.as<float>()[4 * 4 + d] = in.v.as<float>()[4 * 4 + d] = 0;
  ReferenceOutputs a = RunForward(with_key, in);
  Problem with_sink = with_key;  // the last key, whose logit is 0, is not there
  with_sink.kv_len = 4;
  with_sink.denominator = DenominatorKind::kSink;
  with_sink.sink_logits = {0};
  ReferenceOutputs b = RunForward(with_sink, in);
  for (size_t n = 0; n < a.o.size(); ++n) EXPECT_NEAR(a.o[n], b.o[n], 1e-14);
  for (size_t n = 0; n < a.lse.size(); ++n) EXPECT_NEAR(a.lse[n], b.lse[n], 1e-14);
}

TEST(ReferenceForward, SaturatesScoresAtTheSoftcap) {
  Problem p = Small(1, 2, 1);
  p.softcap = 3;
  p.scale = 1;
  float q[] = {1e6f}, k[] = {1, -1}, v[] = {1, 0};
  ReferenceOutputs out = Reference(p, {q, k, v}).Forward();
  EXPECT_NEAR(out.o[0], 1 / (1 + std::exp(-6.0)), 1e-14);
}

TEST(ReferenceForward, SubtractsSlopeTimesDistanceWithAlibi) {
  Problem p = Small(2, 4, 1);
  p.scale = 0;
  p.alignment = Alignment::kOffsets;
  p.offsets = {1};
  p.alibi_slopes = {0.5f};
  ProblemInputs in = RandomInputs(p, 1);
  Reference reference(p, TensorsOf(in));
  for (int64_t i = 0; i < 2; ++i) {
    ReferenceRow row = reference.Row(0, 0, p.SequenceAt(0), i);
    for (int64_t j = 0; j < 4; ++j) EXPECT_EQ(row.score[j], -0.5 * std::abs(i + 1 - j));
  }
}

TEST(ReferenceForward, LetsNanSurfaceWhereItIsSeenAndNowhereElse) {
  Problem p = Small(6, 6, 2);
  p.causal = true;
  ProblemInputs in = RandomInputs(p, 8), clean = RandomInputs(p, 8);
  for (int64_t d = 0; d < 2; ++d) in.k.as<float>()[4 * 2 + d] = kFloatNan;
  ReferenceOutputs out = RunForward(p, in), expected = RunForward(p, clean);
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(std::isnan(out.o[i * 2]), i >= 4) << i;
    EXPECT_EQ(std::isnan(out.lse[i]), i >= 4) << i;
    if (i < 4) {
      EXPECT_EQ(out.o[i * 2], expected.o[i * 2]);
    }
  }
}

TEST(ReferenceForward, GivesNanWhenAllVisibleScoresAreMinusInfinity) {
  Problem p = Small(1, 2, 1);
  float q[] = {std::numeric_limits<float>::infinity()}, k[] = {-1, -2}, v[] = {1, 1};
  ReferenceOutputs out = Reference(p, {q, k, v}).Forward();
  EXPECT_TRUE(std::isnan(out.o[0]));
}

TEST(ReferenceForward, KeepsTheStatedFractionOfScoresWithinFiveSigma) {
  Problem p = Small(128, 256, 16);
  p.q_heads = p.kv_heads = 2;
  p.v_head_dim = 256;
  p.dropout = {26, 99, 1};
  ProblemInputs in = WithIdentityValues(p, 3);
  ReferenceOutputs out = RunForward(p, in);
  double kept = 0, count = 2.0 * 128 * 256, keep = 230.0 / 256;
  for (double pz : out.o) kept += pz != 0;
  EXPECT_NEAR(kept, count * keep, 5 * std::sqrt(count * keep * (1 - keep)));
}

TEST(ReferenceForward, DropsTheSameScoresInAShardAsInTheWhole) {
  Problem whole = Small(40, 40, 4);
  whole.batch = 2;
  whole.q_heads = whole.kv_heads = 3;
  whole.dropout = {100, 5, 6};
  Problem shard = whole;
  shard.batch = shard.q_heads = shard.kv_heads = 1;
  shard.shard = {1, 2, 3};
  ProblemInputs in = RandomInputs(whole, 9);
  Reference of_whole(whole, TensorsOf(in)), of_shard(shard, TensorsOf(in));
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(of_whole.Row(1, 2, whole.SequenceAt(1), i).dropout_scale,
              of_shard.Row(0, 0, shard.SequenceAt(0), i).dropout_scale);
  }
}

TEST(ReferenceBackward, SharesTheGradientOfTheMeanEqually) {
  // Q = 0 makes P = 1/kv_len: each dV row is the column sum of dO over kv_len, dK is 0.
  Problem p = Small(4, 5, 3);
  ProblemInputs in = RandomInputs(p, 10);
  std::fill_n(in.q.as<float>(), 12, 0.0f);
  ReferenceGradients g = Reference(p, TensorsOf(in)).Backward(in.d_o.data(), nullptr);
  for (int64_t d = 0; d < 3; ++d) {
    double sum = 0;
    for (int64_t i = 0; i < 4; ++i) sum += in.d_o.as<float>()[i * 3 + d];
    for (int64_t j = 0; j < 5; ++j) EXPECT_NEAR(g.d_v[j * 3 + d], sum / 5, 1e-14);
  }
  for (double d_k : g.d_k) EXPECT_EQ(d_k, 0);
}

TEST(ReferenceBackward, HasDeltaEqualToTheSumOfProbabilityTimesItsGradient) {
  Problem p = Small(6, 7, 4);
  p.dropout = {90, 1, 1};
  ProblemInputs in = RandomInputs(p, 12);
  Reference reference(p, TensorsOf(in));
  ReferenceOutputs out = reference.Forward();
  for (int64_t i = 0; i < 6; ++i) {
    ReferenceRow row = reference.Row(0, 0, p.SequenceAt(0), i);
    double from_o = 0, from_p = 0;
    for (int64_t d = 0; d < 4; ++d) from_o += in.d_o.as<float>()[i * 4 + d] * out.o[i * 4 + d];
    for (int64_t j = 0; j < 7; ++j) {
      for (int64_t d = 0; d < 4; ++d) {
        from_p += row.probability[j] * row.dropout_scale[j] * in.d_o.as<float>()[i * 4 + d] *
                  in.v.as<float>()[j * 4 + d];
      }
    }
    EXPECT_NEAR(from_o, from_p, 1e-13);
  }
}

TEST(ReferenceBackward, AddsTheGradientsOfAGroupOfHeads) {
  Problem grouped = Small(3, 4, 2);
  grouped.q_heads = 4;
  grouped.kv_heads = 2;
  ProblemInputs in = RandomInputs(grouped, 13);
  Problem repeated = grouped;  // each key head twice
  repeated.kv_heads = 4;
  ProblemInputs copies = RandomInputs(repeated, 13);
  for (int64_t h = 0; h < 4; ++h) {
    std::copy_n(in.k.as<float>() + h / 2 * 8, 8, copies.k.as<float>() + h * 8);
    std::copy_n(in.v.as<float>() + h / 2 * 8, 8, copies.v.as<float>() + h * 8);
  }
  std::copy_n(in.q.as<float>(), 24, copies.q.as<float>());
  std::copy_n(in.d_o.as<float>(), 24, copies.d_o.as<float>());
  std::copy_n(in.d_lse.as<float>(), 12, copies.d_lse.as<float>());
  ReferenceGradients a = RunBackward(grouped, in), b = RunBackward(repeated, copies);
  for (size_t n = 0; n < a.d_q.size(); ++n) EXPECT_NEAR(a.d_q[n], b.d_q[n], 1e-14);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t n = 0; n < 8; ++n) {
      EXPECT_NEAR(a.d_k[h * 8 + n], b.d_k[2 * h * 8 + n] + b.d_k[(2 * h + 1) * 8 + n], 1e-14);
      EXPECT_NEAR(a.d_v[h * 8 + n], b.d_v[2 * h * 8 + n] + b.d_v[(2 * h + 1) * 8 + n], 1e-14);
    }
  }
}

TEST(ReferenceBackward, IsTheSumOverHalvesOfTheKeysWhenGivenTheWholeLse) {
  // Keys split over two calls: merge o and lse, then run backward on each half with both.
  Problem whole = Small(5, 8, 3);
  ProblemInputs in = RandomInputs(whole, 14);
  Reference reference(whole, TensorsOf(in));
  ReferenceOutputs out = reference.Forward();
  ReferenceGradients expected = reference.Backward(in.d_o.data(), in.d_lse.as<float>());
  Problem half = whole;
  half.kv_len = 4;
  std::vector<double> d_q(15);
  for (int64_t part = 0; part < 2; ++part) {
    ReferenceTensors tensors = {in.q.data(), in.k.as<float>() + part * 12,
                                in.v.as<float>() + part * 12};
    ReferenceGradients g =
        Reference(half, tensors).Backward(in.d_o.data(), in.d_lse.as<float>(), &out);
    for (size_t n = 0; n < 15; ++n) d_q[n] += g.d_q[n];
    for (size_t n = 0; n < 12; ++n) {
      EXPECT_NEAR(g.d_k[n], expected.d_k[part * 12 + n], 1e-13);
      EXPECT_NEAR(g.d_v[n], expected.d_v[part * 12 + n], 1e-13);
    }
  }
  for (size_t n = 0; n < 15; ++n) EXPECT_NEAR(d_q[n], expected.d_q[n], 1e-13);
}

// The same numbers in another layout give the same results there.
TEST(Reference, DoesNotDependOnTheLayout) {
  Problem packed = Small(5, 5, 2);
  packed.q_heads = packed.kv_heads = 2;
  packed.layout = Layout::kPackedThd;
  packed.cu_seqlens_q = packed.cu_seqlens_k = {0, 5};
  Problem dense = packed;
  dense.layout = Layout::kBlhd;
  dense.cu_seqlens_q.clear();
  dense.cu_seqlens_k.clear();
  ProblemInputs in = RandomInputs(dense, 15);
  EXPECT_EQ(RunForward(packed, in).o, RunForward(dense, in).o);
  EXPECT_EQ(RunForward(packed, in).lse, RunForward(dense, in).lse);
  EXPECT_EQ(RunBackward(packed, in).d_k, RunBackward(dense, in).d_k);
}

TEST(Reference, KeepsPackedSequencesApart) {
  Problem packed = Small(9, 7, 2);
  packed.batch = 3;
  packed.layout = Layout::kPackedHtd;
  packed.cu_seqlens_q = {0, 4, 4, 9};
  packed.cu_seqlens_k = {0, 3, 5, 7};
  ProblemInputs in = RandomInputs(packed, 16);
  ReferenceOutputs all = RunForward(packed, in);
  Problem last = Small(5, 2, 2);
  ReferenceTensors tensors = {in.q.as<float>() + 4 * 2, in.k.as<float>() + 5 * 2,
                              in.v.as<float>() + 5 * 2};
  ReferenceOutputs alone = Reference(last, tensors).Forward();
  for (size_t n = 0; n < alone.o.size(); ++n) EXPECT_EQ(all.o[4 * 2 + n], alone.o[n]);
  for (size_t n = 0; n < alone.lse.size(); ++n) EXPECT_EQ(all.lse[4 + n], alone.lse[n]);
}

}  // namespace
}  // namespace attnd
