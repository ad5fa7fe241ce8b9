#include "client/shards/bias_gradient_sum.h"

#include <utility>

namespace attnd {

BiasGradientSum::BiasGradientSum(const Problem& problem, const std::vector<ShardRange>& shards,
                                 float* d_bias)
    : problem_(problem), shards_(shards), d_bias_(d_bias) {
  const BroadcastShape& shape = problem.bias->shape;
  head_sum_.assign(shape.rows * shape.columns, 0.0f);
}

void BiasGradientSum::Add(int64_t index, std::vector<float> gradient) {
  absl::MutexLock lock(&mutex_);
  early_.emplace(index, std::move(gradient));
  for (auto it = early_.find(next_); it != early_.end(); it = early_.find(next_)) {
    AddShard(shards_[next_], it->second);
    early_.erase(it);
    ++next_;
  }
}

void BiasGradientSum::AddShard(const ShardRange& range, const std::vector<float>& gradient) {
  const BroadcastShape& whole = problem_.bias->shape;
  BroadcastShape from = SubProblem(problem_, range).bias->shape;
  if (gradient.empty()) from.rows = from.columns = 0;  // all of it lies outside: zeros
  const float* addend = gradient.data();
  for (int64_t b = range.batch_begin; b < range.batch_begin + from.batch; ++b) {
    float* entry = d_bias_ + (whole.batch == 1 ? 0 : b * whole.heads * whole.rows * whole.columns);
    bool first_entry = whole.batch != 1 || b == 0;
    for (int64_t h = 0; h < from.heads; ++h, addend += from.rows * from.columns) {
      int64_t head = range.kv_head_begin * problem_.group_size() + h;
      if (!range.expand_bias_heads) {
        int64_t plane = whole.heads == 1 ? 0 : head;
        AddPlane(from, addend, first_entry, entry + plane * whole.rows * whole.columns);
        continue;
      }
      AddPlane(from, addend, head == 0, head_sum_.data());
      if (head + 1 == problem_.q_heads) AddPlane(whole, head_sum_.data(), first_entry, entry);
    }
  }
}

void BiasGradientSum::AddPlane(const BroadcastShape& from_shape, const float* from, bool first,
                               float* to) {
  const BroadcastShape& whole = problem_.bias->shape;
  for (int64_t i = 0; i < whole.rows; ++i) {
    for (int64_t j = 0; j < whole.columns; ++j, ++to) {
      bool inside = i < from_shape.rows && j < from_shape.columns;
      float addend = inside ? from[i * from_shape.columns + j] : 0.0f;
      *to = first ? addend : *to + addend;
    }
  }
}

}  // namespace attnd
