#include "client/demo/transformer.h"

#include <cmath>
#include <random>

#include "base/check.h"
#include "base/status_macros.h"

namespace attnd::demo {
namespace {

Parameter Constant(int64_t size, float value) {
  return {.value = Floats(size, value), .gradient = Floats(size), .decays = false};
}

Parameter Normal(int64_t size, double deviation, bool decays, std::mt19937_64& random) {
  Parameter parameter{.value = Floats(size), .gradient = Floats(size), .decays = decays};
  std::normal_distribution<double> normal(0, deviation);
  for (float& x : parameter.value) x = static_cast<float>(normal(random));
  return parameter;
}

}  // namespace

Transformer::Transformer(const TransformerShape& shape, uint64_t seed) : shape_(shape) {
  std::mt19937_64 random(seed);
  int64_t dim = shape.dim();
  tokens_ = Normal(shape.vocabulary * dim, 0.1, false, random);
  positions_ = Normal(shape.context * dim, 0.1, false, random);
  double deviation = 1 / std::sqrt(static_cast<double>(dim));
  // Each block adds to the residual stream twice; smaller last matrices keep its variance near one.
  double last = deviation / std::sqrt(2.0 * static_cast<double>(shape.layers));
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    Block& block = blocks_.emplace_back();
    block.gain1 = Constant(dim, 1), block.shift1 = Constant(dim, 0);
    for (Parameter& weight : block.qkv_weight) weight = Normal(dim * dim, deviation, true, random);
    for (Parameter& bias : block.qkv_bias) bias = Constant(dim, 0);
    block.out_weight = Normal(dim * dim, last, true, random), block.out_bias = Constant(dim, 0);
    block.gain2 = Constant(dim, 1), block.shift2 = Constant(dim, 0);
    block.up_weight = Normal(dim * 4 * dim, deviation, true, random);
    block.up_bias = Constant(4 * dim, 0);
    block.down_weight = Normal(4 * dim * dim, last / 2, true, random);
    block.down_bias = Constant(dim, 0);
  }
  last_gain_ = Constant(dim, 1), last_shift_ = Constant(dim, 0);
  head_weight_ = Normal(dim * shape.vocabulary, deviation / 2, true, random);
  head_bias_ = Constant(shape.vocabulary, 0);
}

std::vector<Parameter*> Transformer::parameters() {
  std::vector<Parameter*> all = {&tokens_, &positions_};
  for (Block& b : blocks_) {
    all.insert(all.end(),
               {&b.gain1, &b.shift1, &b.qkv_weight[0], &b.qkv_weight[1], &b.qkv_weight[2],
                &b.qkv_bias[0], &b.qkv_bias[1], &b.qkv_bias[2], &b.out_weight, &b.out_bias,
                &b.gain2, &b.shift2, &b.up_weight, &b.up_bias, &b.down_weight, &b.down_bias});
  }
  all.insert(all.end(), {&last_gain_, &last_shift_, &head_weight_, &head_bias_});
  return all;
}

absl::StatusOr<double> Transformer::LossAndGradients(const TextBatch& batch, uint64_t dropout_seed,
                                                     AttentionSource& attention) {
  CHECK(batch.length <= shape_.context) << batch.length;
  for (Parameter* p : parameters()) p->gradient.assign(p->gradient.size(), 0);
  std::vector<BlockState> states(blocks_.size());
  Floats x, normed, logits, d_logits, dx, d_normed;
  Embed(batch, x);
  for (size_t l = 0; l < blocks_.size(); ++l) {
    Problem problem = AttentionProblem(batch, static_cast<int64_t>(l), dropout_seed);
    RETURN_IF_ERROR(BlockForward(problem, blocks_[l], attention, states[l], x));
  }
  NormState last_norm;
  LayerNorm(x, last_gain_, last_shift_, last_norm, normed);
  Linear(normed, head_weight_, head_bias_, logits);
  double loss = CrossEntropy(logits, batch.target, d_logits);

  LinearBackward(normed, d_logits, head_weight_, head_bias_, d_normed);
  LayerNormBackward(last_norm, d_normed, last_gain_, last_shift_, dx);
  for (size_t l = blocks_.size(); l-- > 0;) {
    Problem problem = AttentionProblem(batch, static_cast<int64_t>(l), dropout_seed);
    RETURN_IF_ERROR(BlockBackward(problem, blocks_[l], attention, states[l], dx));
  }
  EmbedBackward(batch, dx);
  return loss;
}

Problem Transformer::AttentionProblem(const TextBatch& batch, int64_t layer,
                                      uint64_t dropout_seed) const {
  Problem problem;
  problem.batch = batch.batch;
  problem.q_heads = problem.kv_heads = shape_.heads;
  problem.q_len = problem.kv_len = batch.length;
  problem.qk_head_dim = problem.v_head_dim = shape_.head_dim;
  problem.layout = Layout::kBlhd;
  problem.alignment = Alignment::kTopLeft;
  problem.causal = true;
  problem.dropout = {.threshold = static_cast<uint32_t>(std::lround(256 * shape_.dropout)),
                     .seed = dropout_seed,
                     .offset = static_cast<uint64_t>(layer)};
  return problem;
}

void Transformer::Embed(const TextBatch& batch, Floats& x) const {
  int64_t dim = shape_.dim(), rows = batch.batch * batch.length;
  x.resize(rows * dim);
  for (int64_t r = 0; r < rows; ++r) {
    const float* token = &tokens_.value[batch.input[r] * dim];
    const float* position = &positions_.value[(r % batch.length) * dim];
    for (int64_t d = 0; d < dim; ++d) x[r * dim + d] = token[d] + position[d];
  }
}

void Transformer::EmbedBackward(const TextBatch& batch, const Floats& dx) {
  int64_t dim = shape_.dim(), rows = batch.batch * batch.length;
  for (int64_t r = 0; r < rows; ++r) {
    float* token = &tokens_.gradient[batch.input[r] * dim];
    float* position = &positions_.gradient[(r % batch.length) * dim];
    for (int64_t d = 0; d < dim; ++d) {
      token[d] += dx[r * dim + d];
      position[d] += dx[r * dim + d];
    }
  }
}

absl::Status Transformer::BlockForward(const Problem& problem, const Block& block,
                                       AttentionSource& attention, BlockState& s, Floats& x) const {
  Floats branch;
  LayerNorm(x, block.gain1, block.shift1, s.norm1, s.normed1);
  Linear(s.normed1, block.qkv_weight[0], block.qkv_bias[0], s.q);
  Linear(s.normed1, block.qkv_weight[1], block.qkv_bias[1], s.k);
  Linear(s.normed1, block.qkv_weight[2], block.qkv_bias[2], s.v);
  s.o.resize(s.q.size());
  s.lse.resize(problem.LseElements());
  RETURN_IF_ERROR(
      attention.Forward(problem, {s.q.data(), s.k.data(), s.v.data()}, s.o.data(), s.lse.data()));
  Linear(s.o, block.out_weight, block.out_bias, branch);
  Accumulate(branch, x);

  LayerNorm(x, block.gain2, block.shift2, s.norm2, s.normed2);
  Linear(s.normed2, block.up_weight, block.up_bias, s.up);
  Gelu(s.up, s.active);
  Linear(s.active, block.down_weight, block.down_bias, branch);
  Accumulate(branch, x);
  return absl::OkStatus();
}

absl::Status Transformer::BlockBackward(const Problem& problem, Block& block,
                                        AttentionSource& attention, const BlockState& s,
                                        Floats& dx) {
  Floats d_active, d_up, d_normed, d_branch;
  LinearBackward(s.active, dx, block.down_weight, block.down_bias, d_active);
  GeluBackward(s.up, d_active, d_up);
  LinearBackward(s.normed2, d_up, block.up_weight, block.up_bias, d_normed);
  LayerNormBackward(s.norm2, d_normed, block.gain2, block.shift2, d_branch);
  Accumulate(d_branch, dx);

  RETURN_IF_ERROR(AttentionBackward(problem, block, attention, s, dx, d_normed));
  LayerNormBackward(s.norm1, d_normed, block.gain1, block.shift1, d_branch);
  Accumulate(d_branch, dx);
  return absl::OkStatus();
}

absl::Status Transformer::AttentionBackward(const Problem& problem, Block& block,
                                            AttentionSource& attention, const BlockState& s,
                                            const Floats& dx, Floats& d_normed) {
  Floats d_o, d_part;
  LinearBackward(s.o, dx, block.out_weight, block.out_bias, d_o);
  Floats d_qkv[3] = {Floats(s.q.size()), Floats(s.k.size()), Floats(s.v.size())};
  RETURN_IF_ERROR(attention.Backward(problem, {s.q.data(), s.k.data(), s.v.data()}, s.o.data(),
                                     s.lse.data(), d_o.data(),
                                     {d_qkv[0].data(), d_qkv[1].data(), d_qkv[2].data()}));
  d_normed.assign(s.normed1.size(), 0);
  for (int part = 0; part < 3; ++part) {
    LinearBackward(s.normed1, d_qkv[part], block.qkv_weight[part], block.qkv_bias[part], d_part);
    Accumulate(d_part, d_normed);
  }
  return absl::OkStatus();
}

}  // namespace attnd::demo
