#include "client/cpp/bias_gradient_sum.h"

#include <algorithm>
#include <utility>

namespace attnd {

BiasGradientSum::BiasGradientSum(const Problem& problem, const std::vector<ShardRange>& shards,
                                 float* d_bias)
    : problem_(problem), shards_(shards), d_bias_(d_bias) {
  const BroadcastShape& shape = problem.bias->shape;
  std::fill(d_bias, d_bias + shape.elements(), 0.0f);
  head_sum_.assign(shape.rows * shape.columns, 0.0f);
}

void BiasGradientSum::Add(int64_t index, std::vector<float> gradient) {
  absl::MutexLock lock(&mutex_);
  early_.emplace(index, std::move(gradient));
  for (auto it = early_.find(next_); it != early_.end(); it = early_.find(next_)) {
    if (!it->second.empty()) AddShard(shards_[next_], it->second);
    early_.erase(it);
    ++next_;
  }
}

void BiasGradientSum::AddShard(const ShardRange& range, const std::vector<float>& gradient) {
  const BroadcastShape& whole = problem_.bias->shape;
  const BroadcastShape from = SubProblem(problem_, range).bias->shape;
  int64_t plane = whole.rows * whole.columns;
  int64_t head_begin = whole.heads == 1 ? 0 : range.kv_head_begin * problem_.group_size();
  bool last_heads = range.kv_head_begin + range.kv_head_count == problem_.kv_heads;
  const float* addend = gradient.data();
  for (int64_t b = 0; b < from.batch; ++b) {
    int64_t to_batch = whole.batch == 1 ? 0 : range.batch_begin + b;
    for (int64_t h = 0; h < from.heads; ++h, addend += from.rows * from.columns) {
      float* to = d_bias_ + (to_batch * whole.heads + head_begin) * plane;
      if (range.expand_bias_heads) {
        AddPlane(from, addend, head_sum_.data());
        if (!last_heads || h + 1 < from.heads) continue;
        AddPlane(whole, head_sum_.data(), to);
        std::fill(head_sum_.begin(), head_sum_.end(), 0.0f);
      } else {
        AddPlane(from, addend, to + h * plane);
      }
    }
  }
}

void BiasGradientSum::AddPlane(const BroadcastShape& from_shape, const float* from, float* to) {
  int64_t to_columns = problem_.bias->shape.columns;
  for (int64_t i = 0; i < from_shape.rows; ++i) {
    for (int64_t j = 0; j < from_shape.columns; ++j) {
      to[i * to_columns + j] += from[i * from_shape.columns + j];
    }
  }
}

}  // namespace attnd
