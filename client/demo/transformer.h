// Transformer: a small causal character model (pre-norm blocks of attention and a four times wider
// MLP, learned positions), forward and backward in plain float32 C++, except attention, which an
// AttentionSource computes. One thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/attention_source.h"
#include "client/demo/layers.h"
#include "client/demo/text.h"

namespace attnd::demo {

struct TransformerShape {
  int64_t vocabulary = 0;
  int64_t context = 64;
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t head_dim = 16;
  float dropout = 0;  // of attention's probabilities
  int64_t dim() const { return heads * head_dim; }
};

class Transformer {
 public:
  // Weights are drawn from `seed`.
  Transformer(const TransformerShape& shape, uint64_t seed);

  // Mean cross-entropy of predicting batch.target, in nats a character; sets every parameter's
  // gradient. batch.length ≤ context. `dropout_seed` must change from step to step. Errors: the
  // source's; gradients are then unspecified.
  absl::StatusOr<double> LossAndGradients(const TextBatch& batch, uint64_t dropout_seed,
                                          AttentionSource& attention);

  std::vector<Parameter*> parameters();

 private:
  struct Block {
    Parameter gain1, shift1, qkv_weight[3], qkv_bias[3], out_weight, out_bias;
    Parameter gain2, shift2, up_weight, up_bias, down_weight, down_bias;
  };
  // One block keeps these from forward for backward; rows = batch·length.
  struct BlockState {
    NormState norm1, norm2;
    Floats normed1, q, k, v, o;  // [rows, dim]
    Floats lse;                  // [batch, heads, length]
    Floats normed2, up, active;  // [rows, dim], [rows, 4·dim] twice
  };

  Problem AttentionProblem(const TextBatch& batch, int64_t layer, uint64_t dropout_seed) const;
  void Embed(const TextBatch& batch, Floats& x) const;
  void EmbedBackward(const TextBatch& batch, const Floats& dx);
  // Both replace x (dx) by the block's output (its input's gradient).
  absl::Status BlockForward(const Problem& problem, const Block& block, AttentionSource& attention,
                            BlockState& state, Floats& x) const;
  absl::Status BlockBackward(const Problem& problem, Block& block, AttentionSource& attention,
                             const BlockState& state, Floats& dx);
  absl::Status AttentionBackward(const Problem& problem, Block& block, AttentionSource& attention,
                                 const BlockState& state, const Floats& dx, Floats& d_normed);

  TransformerShape shape_;
  Parameter tokens_;     // [vocabulary, dim]
  Parameter positions_;  // [context, dim]
  std::vector<Block> blocks_;
  Parameter last_gain_, last_shift_, head_weight_, head_bias_;
};

}  // namespace attnd::demo
