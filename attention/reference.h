// Reference attention: the oracle. float64, plain loops, every option of a Problem, forward and
// backward, written from docs/NUMERICS.md and sharing no rule with the engines but Problem, the
// dropout generator and the tensor layouts. It is never made fast.
//
// Inputs are the tensors' stored values, converted exactly. Nothing is rounded. Backward
// differentiates the forward function itself (o and lse are recomputed in float64) unless the
// caller gives o and lse; then P = exp(S − lse) and delta = rowsum(dO ∘ O) use those, as engines
// do. Memory: inputs and outputs in float64 and O(kv_len) for one row. Any thread; one per object.
// Errors: none; the problem has been validated.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/masks/mask_oracle.h"
#include "attention/problem.h"

namespace attnd {

// Points to the inputs that both directions read, in the problem's layout and element types.
struct ReferenceTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;  // iff problem.bool_mask
  const void* bias = nullptr;          // iff problem.bias
};

struct ReferenceOutputs {
  std::vector<double> o;    // in the problem's layout
  std::vector<double> lse;  // [batch, q_heads, q_len] or packed [q_heads, q_len]
};

struct ReferenceGradients {
  std::vector<double> d_q, d_k, d_v;  // in the problem's layout
  std::vector<double> d_bias;         // of the bias's shape; empty unless its gradient is wanted
  std::vector<double> d_sink;         // [batch, q_heads]; empty unless the denominator is a sink
};

// One row (b, h, i) of the score matrix. Entries of keys that are not visible mean nothing.
struct ReferenceRow {
  std::vector<bool> visible;          // [kv_len of the sequence]
  std::vector<double> product;        // scale·q·k, before softcap
  std::vector<double> score;          // after softcap, bias and ALiBi
  std::vector<double> probability;    // exp(score − lse)
  std::vector<double> dropout_scale;  // 0 where dropped, else 1/keep probability
  double lse = 0;                     // −infinity when no key is visible
  bool any_visible = false;
};

class Reference {
 public:
  // `problem` and the tensors must outlive the object.
  Reference(const Problem& problem, const ReferenceTensors& tensors);
  // With q, k and v in float64, of the problem's sizes; those of `tensors` are not read.
  Reference(const Problem& problem, const ReferenceTensors& tensors, std::vector<double> q,
            std::vector<double> k, std::vector<double> v);

  ReferenceOutputs Forward() const;

  // d_lse may be null (zero). `given` may be null: o and lse are then recomputed.
  ReferenceGradients Backward(const void* d_o, const float* d_lse,
                              const ReferenceOutputs* given = nullptr) const;

  // One (batch entry, query head), for callers that interleave other work.
  void ForwardHead(int64_t batch_index, int64_t q_head, ReferenceOutputs& outputs) const;
  // Adds to d_k and d_v, sets d_q and d_sink of this head, and adds to d_bias.
  void BackwardHead(int64_t batch_index, int64_t q_head, const std::vector<double>& d_o,
                    const float* d_lse, const ReferenceOutputs* given,
                    ReferenceGradients& gradients) const;
  ReferenceOutputs EmptyOutputs() const;      // zeros, lse −infinity
  ReferenceGradients EmptyGradients() const;  // zeros

  ReferenceRow Row(int64_t batch_index, int64_t q_head, const Sequence& sequence,
                   int64_t row) const;

  const Problem& problem() const { return problem_; }
  const std::vector<double>& q() const { return q_; }
  const std::vector<double>& k() const { return k_; }
  const std::vector<double>& v() const { return v_; }

 private:
  bool IsVisible(int64_t b, int64_t h, const Sequence& s, int64_t i, int64_t j) const;
  double BiasAt(int64_t b, int64_t h, int64_t i, int64_t j) const;
  void FillScores(int64_t b, int64_t h, const Sequence& s, int64_t i, ReferenceRow& row) const;
  struct Denominator {
    double most, sum;  // the largest score; Σ exp(score − most)
  };
  Denominator DenominatorOf(int64_t h, const ReferenceRow& row) const;
  void BackwardRow(int64_t b, int64_t h, const Sequence& s, int64_t i,
                   const std::vector<double>& d_o, const float* d_lse,
                   const ReferenceOutputs* given, ReferenceGradients& gradients) const;

  const Problem& problem_;
  ReferenceTensors tensors_;
  MaskSpec mask_spec_;  // mask_ refers to both
  MaskCall mask_call_;
  std::optional<MaskOracle> mask_;
  std::vector<double> q_, k_, v_;
};

// `count` stored numbers as float64.
std::vector<double> ToDoubles(ElementType element, const void* data, int64_t count);

}  // namespace attnd
