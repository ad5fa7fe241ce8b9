#include "client/demo/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "client/demo/adamw.h"
#include "client/demo/local_attention.h"

namespace attnd::demo {
namespace {

constexpr absl::string_view kPangrams =
    "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog. "
    "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog. ";

TransformerShape SmallShape(const CharacterText& text, float dropout) {
  return {.vocabulary = text.vocabulary(),
          .context = 8,
          .layers = 2,
          .heads = 2,
          .head_dim = 4,
          .dropout = dropout};
}

double Loss(Transformer& model, const TextBatch& batch) {
  LocalAttention attention;
  return *model.LossAndGradients(batch, /*dropout_seed=*/7, attention);
}

// Moves one parameter along `direction` and compares the loss's central difference with the
// gradient's projection. float32 losses near 3 resolve 2e-7, so a step of 1e-2 gives 1e-4 of the
// projection, and truncation is of the same size; a wrong term changes it by far more than 2 %.
void ExpectSlope(Transformer& model, const TextBatch& batch, Parameter& parameter,
                 const Floats& direction, const char* what) {
  const double step = 1e-2;
  Loss(model, batch);
  double expected = 0;
  for (size_t i = 0; i < direction.size(); ++i) expected += parameter.gradient[i] * direction[i];
  Floats saved = parameter.value;
  auto loss_at = [&](double t) {
    for (size_t i = 0; i < saved.size(); ++i) {
      parameter.value[i] = static_cast<float>(saved[i] + t * direction[i]);
    }
    return Loss(model, batch);
  };
  double measured = (loss_at(step) - loss_at(-step)) / (2 * step);
  parameter.value = saved;
  EXPECT_NEAR(measured, expected, 0.02 * std::abs(expected) + 3e-4) << what;
}

Floats Unit(Floats direction) {
  double squares = 0;
  for (float x : direction) squares += x * x;
  for (float& x : direction) x /= static_cast<float>(std::sqrt(squares) + 1e-20);
  return direction;
}

TEST(Transformer, GradientsAgreeWithFiniteDifferencesForEachParameter) {
  CharacterText text(kPangrams);
  for (float dropout : {0.0f, 0.25f}) {
    Transformer model(SmallShape(text, dropout), /*seed=*/3);
    std::mt19937_64 random(11);
    TextBatch batch = text.RandomBatch(3, 8, random);
    int index = 0;
    for (Parameter* parameter : model.parameters()) {
      SCOPED_TRACE(testing::Message() << "parameter " << index++ << ", dropout " << dropout);
      Loss(model, batch);
      ExpectSlope(model, batch, *parameter, Unit(parameter->gradient), "along the gradient");
      Floats direction(parameter->value.size());
      std::normal_distribution<float> normal;
      for (float& x : direction) x = normal(random);
      ExpectSlope(model, batch, *parameter, Unit(direction), "along a random direction");
    }
  }
}

TEST(Transformer, StartsNearTheEntropyOfAGuessAndLearnsAText) {
  CharacterText text(kPangrams);
  Transformer model(SmallShape(text, 0.1f), /*seed=*/5);
  AdamW optimiser(model.parameters(), {.rate = 1e-2});
  LocalAttention attention;
  std::mt19937_64 random(2);
  double first = 0, last = 0;
  for (int step = 0; step < 150; ++step) {
    last = *model.LossAndGradients(text.RandomBatch(8, 8, random), step, attention);
    if (step == 0) first = last;
    optimiser.Step(1);
  }
  EXPECT_NEAR(first, std::log(static_cast<double>(text.vocabulary())), 0.5);
  EXPECT_LT(last, 0.6 * first);
}

// Refuses its `at`-th call.
class FailingAttention final : public AttentionSource {
 public:
  explicit FailingAttention(int at) : at_(at) {}
  absl::Status Forward(const Problem& p, const AttentionInputs& in, float* o, float* l) override {
    return calls_++ == at_ ? absl::UnavailableError("full") : local_.Forward(p, in, o, l);
  }
  absl::Status Backward(const Problem& p, const AttentionInputs& in, const float* o, const float* l,
                        const float* d_o, const AttentionGradients& g) override {
    return calls_++ == at_ ? absl::UnavailableError("full") : local_.Backward(p, in, o, l, d_o, g);
  }

 private:
  LocalAttention local_;
  int calls_ = 0;
  int at_;
};

TEST(Transformer, PassesTheSourcesErrorOnFromEachCall) {
  CharacterText text(kPangrams);
  Transformer model(SmallShape(text, 0), /*seed=*/3);
  std::mt19937_64 random(11);
  TextBatch batch = text.RandomBatch(2, 8, random);
  for (int at = 0; at < 4; ++at) {
    FailingAttention attention(at);
    EXPECT_EQ(model.LossAndGradients(batch, 0, attention).status().code(),
              absl::StatusCode::kUnavailable)
        << at;
  }
  FailingAttention attention(4);
  EXPECT_TRUE(model.LossAndGradients(batch, 0, attention).ok());
}

TEST(AdamW, FirstStepIsTheRateAgainstTheGradientsSign) {
  Parameter p{.value = {1, 1}, .gradient = {0.5f, -0.01f}, .decays = false};
  AdamW optimiser({&p}, {.rate = 0.1});
  EXPECT_NEAR(optimiser.Step(1), std::hypot(0.5, 0.01), 1e-6);
  EXPECT_NEAR(p.value[0], 0.9, 1e-5);
  EXPECT_NEAR(p.value[1], 1.1, 1e-5);
}

TEST(AdamW, DecaysOnlyWhatDecays) {
  Parameter matrix{.value = {1}, .gradient = {0}, .decays = true};
  Parameter gain{.value = {1}, .gradient = {0}, .decays = false};
  AdamW optimiser({&matrix, &gain}, {.rate = 0.1, .weight_decay = 0.5});
  optimiser.Step(1);
  EXPECT_NEAR(matrix.value[0], 0.95, 1e-6);
  EXPECT_EQ(gain.value[0], 1);
}

}  // namespace
}  // namespace attnd::demo
