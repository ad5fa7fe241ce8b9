// TrainTwice: the demo's experiment. One transformer learns a text with attention from the source
// under test, a second one, equal in everything else, with local float64 attention.
// Both see the same text in the same order with the same dropout, so their losses differ by the
// attention's rounding alone.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "client/demo/attention_source.h"
#include "client/demo/text.h"
#include "client/demo/transformer.h"

namespace attnd::demo {

struct TrainingOptions {
  int64_t steps = 200;
  int64_t batch = 8;       // sequences a step
  TransformerShape shape;  // vocabulary: the text's
  uint64_t seed = 1;       // of weights, order of the text and dropout
};

// Losses before each step, in nats a character.
struct LossCurves {
  std::vector<double> tested, local;

  // max |tested − local|; NaN when a loss is.
  double LargestDeviation() const;
  // Means of the first and the last tenth of `tested`: single steps see different text.
  double First() const;
  double Last() const;
};

// `progress` is called after each step. The two models run on two threads; `tested` is called by
// one of them. Errors: the source's.
absl::StatusOr<LossCurves> TrainTwice(const TrainingOptions& options, const CharacterText& text,
                                      AttentionSource& tested,
                                      const std::function<void(const LossCurves&)>& progress);

}  // namespace attnd::demo
