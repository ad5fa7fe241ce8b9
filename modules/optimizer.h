// The optimizers of a module. float32, each operation rounded once and none contracted, so that
// every engine gives the same bits; scalars and powers are float64 and become float32 once a step.
//     g ← multiplier · gradient                               t: applied steps, from 1
//   SGD    g ← g + λp;  b ← g at t = 1, else μb + (1 − τ)g;  g ← g + μb if Nesterov, else b;
//          p ← p − ηg                                         without momentum: p ← p − ηg
//   AdamW  p ← p·(1 − ηλ), or g ← g + λp where the decay is coupled (Adam)
//          m ← m + (g − m)·(1 − β1);  v ← β2·v + ((1 − β2)·g)·g;  w ← v, or the largest v (AMSGrad)
//          p ← p − (η/(1 − β1^t))·m / (√w/√(1 − β2^t) + ε)
// Source: torch.optim.SGD, AdamW and Adam (documentation of PyTorch 2); Loshchilov and Hutter,
// arXiv 1711.05101. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "modules/weight_table.h"

namespace attnd {

inline constexpr int64_t kMaxOptimizerGroups = 64;

enum class OptimizerKind : uint8_t { kNone, kSgd, kAdamW };

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kNone;
  double momentum = 0, dampening = 0;  // SGD: μ, τ
  bool nesterov = false;
  double beta1 = 0, beta2 = 0, epsilon = 0;  // AdamW
  bool coupled_decay = false;
  bool amsgrad = false;
  std::vector<uint32_t> groups;  // of the table's entries in order; those beyond are in group 0

  int64_t GroupOf(int64_t entry) const {
    return entry < static_cast<int64_t>(groups.size()) ? groups[entry] : 0;
  }
  int64_t MomentCount() const;  // float32 numbers a trained number: 0..3
};

struct GroupRates {
  double learning_rate = 0;
  double weight_decay = 0;
};

// One parameter's step: an index of StepValues, its own t, and its gradient's multiplier.
struct ParameterStep {
  uint32_t values = 0;
  int64_t step = 0;  // 0: neither it nor its moments change
  double multiplier = 1;
};
struct StepValues {
  OptimizerSpec spec;
  GroupRates rates;
};

// OK, or InvalidArgument "values[0].beta1: expected ..., got ...", in a step of a module that was
// registered with `registered`. `path` is "values[0].".
absl::Status CheckStepValues(absl::string_view path, const StepValues& values,
                             const OptimizerSpec& registered);

// OK, or InvalidArgument "optimizer.adamw.beta1: expected ..., got ...".
absl::Status CheckOptimizer(const OptimizerSpec& spec, const ModuleGraph& graph,
                            const WeightTable& weights);

// The numbers of one step in one group, as float32.
struct StepScalars {
  float multiplier;               // of gradients
  float decay;                    // λ, or 1 − ηλ where it is decoupled
  float rate;                     // η, or η/(1 − β1^t)
  float momentum, gain;           // μ, 1 − τ
  float toward1, keep2, toward2;  // 1 − β1, β2, 1 − β2
  float root_correction;          // √(1 − β2^t)
  float epsilon;
  bool is_first;  // t = 1
};
// `step` is t. `multiplier` is gradients' scale and clipping together.
StepScalars ScalarsOf(const OptimizerSpec& spec, const GroupRates& rates, int64_t step,
                      double multiplier);

// The moments of one tensor, each [elements]; moments that the optimizer does not have are empty.
struct Moments {
  absl::Span<float> first, second, second_max;
};
void ApplyStep(const OptimizerSpec& spec, const StepScalars& scalars,
               absl::Span<const float> gradient, absl::Span<float> parameter, Moments moments);

// Σ g² of one tensor in float64: runs of 1024 numbers in order, then the runs in order, so that an
// engine may add the runs in parallel. Of several tensors: their sums in the table's order.
double SquaredNorm(absl::Span<const float> gradient);

// min(1, max_norm / (norm + 1e-6)), of gradients that have been multiplied by `multiplier`; 1 where
// max_norm is 0. As torch.nn.utils.clip_grad_norm_.
double ClipFactor(double squared_norm, double multiplier, double max_norm);

}  // namespace attnd
