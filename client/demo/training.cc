#include "client/demo/training.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <numeric>
#include <random>

#include "client/demo/adamw.h"
#include "client/demo/local_attention.h"

namespace attnd::demo {
namespace {

// One model with its optimiser and its source of attention.
class Training {
 public:
  Training(const TrainingOptions& options, const TransformerShape& shape,
           AttentionSource& attention)
      : steps_(static_cast<double>(options.steps)),
        model_(shape, options.seed),
        attention_(attention),
        optimiser_(model_.parameters(), {}) {}

  // The loss before the step. The rate falls from 1 to 0.1 along half a cosine.
  absl::StatusOr<double> Step(int64_t step, const TextBatch& batch) {
    absl::StatusOr<double> loss =
        model_.LossAndGradients(batch, static_cast<uint64_t>(step), attention_);
    if (loss.ok())
      optimiser_.Step(0.55 + 0.45 * std::cos(M_PI * static_cast<double>(step) / steps_));
    return loss;
  }

 private:
  const double steps_;
  Transformer model_;
  AttentionSource& attention_;
  AdamW optimiser_;
};

double Mean(std::vector<double>::const_iterator first, std::vector<double>::const_iterator last) {
  return std::accumulate(first, last, 0.0) / static_cast<double>(last - first);
}

int64_t Tenth(const std::vector<double>& losses) {
  return std::max<int64_t>(static_cast<int64_t>(losses.size()) / 10, 1);
}

}  // namespace

double LossCurves::LargestDeviation() const {
  double largest = 0;
  for (size_t i = 0; i < tested.size(); ++i) {
    double deviation = std::abs(tested[i] - local[i]);
    if (std::isnan(deviation)) return deviation;
    largest = std::max(largest, deviation);
  }
  return largest;
}

double LossCurves::First() const { return Mean(tested.begin(), tested.begin() + Tenth(tested)); }

double LossCurves::Last() const { return Mean(tested.end() - Tenth(tested), tested.end()); }

absl::StatusOr<LossCurves> TrainTwice(const TrainingOptions& options, const CharacterText& text,
                                      AttentionSource& tested,
                                      const std::function<void(const LossCurves&)>& progress) {
  TransformerShape shape = options.shape;
  shape.vocabulary = text.vocabulary();
  LocalAttention reference;
  Training on_tested(options, shape, tested), on_reference(options, shape, reference);
  std::mt19937_64 random(options.seed);
  LossCurves curves;
  for (int64_t step = 0; step < options.steps; ++step) {
    TextBatch batch = text.RandomBatch(options.batch, shape.context, random);
    auto local = std::async(std::launch::async, [&] { return on_reference.Step(step, batch); });
    absl::StatusOr<double> tested_loss = on_tested.Step(step, batch);
    absl::StatusOr<double> local_loss = local.get();
    if (!tested_loss.ok()) return tested_loss.status();
    if (!local_loss.ok()) return local_loss.status();
    curves.tested.push_back(*tested_loss);
    curves.local.push_back(*local_loss);
    progress(curves);
  }
  return curves;
}

}  // namespace attnd::demo
