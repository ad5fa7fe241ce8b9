#include "kernels/cuda/seen_rows.h"

#include <cmath>

#include "attention/element.h"
#include "attention/score_rule.h"
#include "attention/tensor_view.h"
#include "kernels/cuda/layout/descriptors.h"

namespace attnd::cuda {
namespace {

Visibility IntervalsOf(const Problem& p, int64_t b) {
  const SequenceDesc s = DescribeSequence(p, {.batch_begin = b}, 0);
  return {s.q_len, s.kv_len, s.low, s.high};
}

}  // namespace

SeenRows::SeenRows(const Problem& problem, const void* mask_bits, const void* bias)
    : problem_(problem), mask_bits_(static_cast<const uint8_t*>(mask_bits)), bias_(bias) {
  if (problem.mask == nullptr) return;
  mask_spec_ = problem.mask->spec();
  mask_spec_.origin = problem.mask_origin;
  mask_call_ = MaskCallOf(problem);
  described_.emplace(mask_spec_, mask_call_);
}

bool SeenRows::IsKeySeen(int64_t b, int64_t kv_head, int64_t key) const {
  const Visibility intervals = IntervalsOf(problem_, b);
  if (key >= intervals.kv_len) return false;
  const Range rows = RowsThatSee(intervals, static_cast<int>(key), static_cast<int>(key) + 1);
  for (int64_t n = 0; n < problem_.group_size(); ++n) {
    const int64_t head = kv_head * problem_.group_size() + n;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (IsShown(b, head, row, key)) return true;
    }
  }
  return false;
}

bool SeenRows::SeesAny(int64_t b, int64_t q_head, int64_t row) const {
  const int at = static_cast<int>(row);
  const Range keys = VisibleKeys(IntervalsOf(problem_, b), at, at + 1);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    if (IsShown(b, q_head, row, key)) return true;
  }
  return false;
}

bool SeenRows::IsShown(int64_t b, int64_t q_head, int64_t row, int64_t key) const {
  const Problem& p = problem_;
  if (described_.has_value() && !described_->IsVisible(b, q_head, row, key)) return false;
  if (mask_bits_ != nullptr && !MaskBit(*p.bool_mask, mask_bits_, b, q_head, row, key))
    return false;
  return bias_ == nullptr ||
         LoadElement(p.bias->element, bias_, BroadcastIndex(p.bias->shape, b, q_head, row, key)) !=
             -INFINITY;
}

}  // namespace attnd::cuda
