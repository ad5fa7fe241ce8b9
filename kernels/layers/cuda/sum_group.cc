#include "kernels/layers/cuda/sum_group.h"

#include "base/check.h"
#include "kernels/layers/cuda/dense_tensors.h"

namespace attnd {
namespace {

constexpr int64_t kFloatBytes = 4;

ByteRange RangeOf(const void* data, int64_t bytes) {
  return data == nullptr ? ByteRange{} : ByteRange::At(data, bytes);
}
}  // namespace

std::array<ByteRange, 3> ReadBy(const ColumnSumsDesc& sums) {
  const int64_t numbers = sums.rows * sums.columns;
  return {RangeOf(sums.in.data, numbers * CodeBytes(sums.in.element)),
          RangeOf(sums.x.data, numbers * CodeBytes(sums.x.element)),
          RangeOf(sums.statistics, sums.rows * static_cast<int64_t>(sizeof(DenseStatistics)))};
}

std::array<ByteRange, 2> WrittenBy(const ColumnSumsDesc& sums) {
  return {RangeOf(sums.sums, sums.columns * kFloatBytes),
          RangeOf(sums.weight_sums, sums.columns * kFloatBytes)};
}

bool SumGroup::Takes(const ColumnSumsDesc& sums) const {
  return sums_.size() < kMostLaunchedTogether && turns_ + SumTurns(sums) <= LaunchQueue::kTurns &&
         (carries_ + SumCarries(sums)) * kFloatBytes <= LaunchQueue::kStagingBytes &&
         !touched_.Meet(ReadBy(sums), WrittenBy(sums));
}

void SumGroup::Add(const ColumnSumsDesc& sums, double flops) {
  DCHECK(Takes(sums));
  sums_.push_back(sums);
  touched_.Add(ReadBy(sums), WrittenBy(sums));
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
