// The layers of the demo's transformer apart from attention, forward and backward: float32, plain
// loops, fixed order of additions, so that two runs differ by their attention alone. "rows" are
// batch·length. Backward functions add to parameter gradients and overwrite input gradients. Pure;
// any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace attnd::demo {

using Floats = std::vector<float>;

// One trained tensor and its gradient.
struct Parameter {
  Floats value;
  Floats gradient;
  bool decays = false;  // AdamW's weight decay: matrices, not gains, biases or embeddings
};

// y [rows, outs] = x [rows, ins]·weight [ins, outs] + bias [outs]
void Linear(const Floats& x, const Parameter& weight, const Parameter& bias, Floats& y);
void LinearBackward(const Floats& x, const Floats& dy, Parameter& weight, Parameter& bias,
                    Floats& dx);

// LayerNorm keeps these for its backward.
struct NormState {
  Floats normalised;         // [rows, dim]
  Floats inverse_deviation;  // [rows]
};
// y = (x − mean)/sqrt(variance + 1e-5)·gain + shift, over the last dimension of size gain.
void LayerNorm(const Floats& x, const Parameter& gain, const Parameter& shift, NormState& state,
               Floats& y);
void LayerNormBackward(const NormState& state, const Floats& dy, Parameter& gain, Parameter& shift,
                       Floats& dx);

// y = x·Φ(x), Φ by the tanh approximation.
void Gelu(const Floats& x, Floats& y);
void GeluBackward(const Floats& x, const Floats& dy, Floats& dx);

// Mean over rows of −ln softmax(logits)[target], and its gradient [rows, classes].
double CrossEntropy(const Floats& logits, const std::vector<int32_t>& target, Floats& d_logits);

// to += from
void Accumulate(const Floats& from, Floats& to);

}  // namespace attnd::demo
