#include "kernels/layers/cuda/sum_group.h"

#include <array>

#include "base/check.h"
#include "kernels/layers/cuda/dense_tensors.h"

namespace attnd {
namespace {

constexpr int64_t kFloatBytes = 4;

ByteRange RangeOf(const void* data, int64_t bytes) {
  return data == nullptr ? ByteRange{} : ByteRange::At(data, bytes);
}
std::array<ByteRange, 3> ReadsOf(const ColumnSumsDesc& d) {
  const int64_t numbers = d.rows * d.columns;
  return {RangeOf(d.in.data, numbers * CodeBytes(d.in.element)),
          RangeOf(d.x.data, numbers * CodeBytes(d.x.element)),
          RangeOf(d.statistics, d.rows * static_cast<int64_t>(sizeof(DenseStatistics)))};
}
std::array<ByteRange, 2> WritesOf(const ColumnSumsDesc& d) {
  return {RangeOf(d.sums, d.columns * kFloatBytes),
          RangeOf(d.weight_sums, d.columns * kFloatBytes)};
}

}  // namespace

bool SumGroup::Takes(const ColumnSumsDesc& sums) const {
  return sums_.size() < kMostLaunchedTogether && turns_ + SumTurns(sums) <= LaunchQueue::kTurns &&
         (carries_ + SumCarries(sums)) * kFloatBytes <= LaunchQueue::kStagingBytes &&
         !touched_.Meet(ReadsOf(sums), WritesOf(sums));
}

void SumGroup::Add(const ColumnSumsDesc& sums, double flops) {
  DCHECK(Takes(sums));
  sums_.push_back(sums);
  touched_.Add(ReadsOf(sums), WritesOf(sums));
  flops_ += flops;
  turns_ += SumTurns(sums);
  carries_ += SumCarries(sums);
}

std::vector<ColumnSumsDesc> SumGroup::Take(int32_t* turns, float* carries) {
  for (ColumnSumsDesc& of : sums_) {
    of.turns = turns;
    of.carries = carries;
    of.blocks = static_cast<int32_t>(SumBlocks(of));
    turns += SumTurns(of);
    carries += SumCarries(of);
  }
  touched_.Clear();
  flops_ = 0;
  turns_ = carries_ = 0;
  return std::exchange(sums_, {});
}

}  // namespace attnd
