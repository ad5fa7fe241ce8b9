#include "server/call_parts.h"

#include <utility>

namespace attnd {
namespace {

constexpr int64_t kAlignment = 64;  // kernels/backend.h

using TensorRuns = std::array<StridedRuns, kTensors>;

TensorRuns RunsOf(const Problem& whole, const ShardRange& range) {
  const ShardRuns runs = ShardRunsOf(whole, range);
  TensorRuns of = {};
  auto set = [&of](Tensor tensor, const StridedRuns& where) {
    of[static_cast<int>(tensor)] = where;
  };
  set(Tensor::kMaskBits, runs.mask_bits);
  set(Tensor::kBias, runs.bias);
  set(Tensor::kK, runs.k);
  set(Tensor::kDK, runs.k);
  set(Tensor::kV, runs.v);
  set(Tensor::kDV, runs.v);
  set(Tensor::kQ, runs.q);
  set(Tensor::kDQ, runs.q);
  set(Tensor::kLse, runs.lse);
  set(Tensor::kDLse, runs.lse);
  set(Tensor::kO, runs.o);
  set(Tensor::kDO, runs.o);
  if (whole.denominator == DenominatorKind::kSink) set(Tensor::kDSink, runs.d_sink);
  return of;
}

}  // namespace

CallParts::CallParts(const AttentionCall& call) : problem_(&call.problem()) {
  const Problem& p = *problem_;
  if (p.bias && p.bias->want_gradient) return;
  if (!IsPacked(p.layout) && p.batch > 1) {
    along_ = Along::kEntries;
    count_ = p.batch;
  } else if (p.layout == Layout::kBhld || p.layout == Layout::kPackedHtd) {
    along_ = Along::kHeads;
    count_ = p.kv_heads;
  }
  if (count_ > 1 && FindSteps()) return;
  along_ = Along::kNothing;
  count_ = 1;
  step_ = {};
}

bool CallParts::FindSteps() {
  const TensorRuns first = RunsOf(*problem_, RangeOf(0, 1)),
                   second = RunsOf(*problem_, RangeOf(1, 2)),
                   both = RunsOf(*problem_, RangeOf(0, 2));
  for (int n = 0; n < kTensors; ++n) {
    step_[n] = second[n].offset - first[n].offset;
    if (first[n].run_count() != 1 || both[n].run_count() != 1) return false;
    if (step_[n] % kAlignment != 0) return false;
  }
  return true;
}

int64_t CallParts::Complete(Tensor last, int64_t bytes) const {
  const int64_t step = step_[static_cast<int>(last)];
  return step == 0 ? 0 : bytes / step;
}

CallParts::Part CallParts::Of(int64_t begin, int64_t end, const TensorPlaces& whole) const {
  Part part{SubProblem(*problem_, RangeOf(begin, end)), whole};
  for (int n = 0; n < kTensors; ++n) {
    if (part.places.at[n] != nullptr) part.places.at[n] += begin * step_[n];
  }
  return part;
}

ShardRange CallParts::RangeOf(int64_t begin, int64_t end) const {
  ShardRange range;
  range.batch_count = problem_->batch;
  range.kv_head_count = problem_->kv_heads;
  if (along_ == Along::kEntries) {
    range.batch_begin = begin;
    range.batch_count = end - begin;
  }
  if (along_ == Along::kHeads) {
    range.kv_head_begin = begin;
    range.kv_head_count = end - begin;
  }
  return range;
}

}  // namespace attnd
