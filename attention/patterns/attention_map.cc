#include "attention/patterns/attention_map.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace attnd {
int64_t MapShape::BlockEntries(int64_t row_block, int64_t key_block) const {
  return std::min(block, rows - row_block * block) * std::min(block, keys - key_block * block);
}

std::vector<float> BlockAverages(const MapShape& shape, absl::Span<const double> sums) {
  std::vector<float> averages(sums.size());
  const int64_t columns = shape.key_blocks();
  for (int64_t n = 0; n < static_cast<int64_t>(sums.size()); ++n) {
    averages[n] = static_cast<float>(
        sums[n] / static_cast<double>(shape.BlockEntries(n / columns, n % columns)));
  }
  return averages;
}

std::vector<float> PoolBlocks(const MapShape& shape, absl::Span<const float> map) {
  return PoolDiagonals(shape, map, 1);
}

std::vector<float> PoolDiagonals(const MapShape& shape, absl::Span<const float> map, int diagonal) {
  CHECK(diagonal % 2 == 1 && static_cast<int64_t>(map.size()) == shape.rows * shape.keys);
  const int64_t reach = diagonal / 2, columns = shape.key_blocks();
  std::vector<double> sums(static_cast<size_t>(shape.row_blocks() * columns));
  // Each row of a block has a part of each of the diagonal's lines.
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t block = 0; block < columns; ++block) {
      const int64_t begin = block * shape.block, end = std::min(begin + shape.block, shape.keys);
      double sum = 0;
      for (int64_t t = -reach; t <= reach; ++t) {
        const int64_t i = row + t, first = std::max<int64_t>(begin + t, 0),
                      last = std::min(end + t, shape.keys);
        if (i < 0 || i >= shape.rows) continue;
        const float* line = &map[i * shape.keys];
        for (int64_t j = first; j < last; ++j) sum += line[j];
      }
      sums[row / shape.block * columns + block] += sum;
    }
  }
  return BlockAverages(shape, sums);
}

double FrobeniusDistance(absl::Span<const float> a, absl::Span<const float> b) {
  CHECK(a.size() == b.size());
  double sum = 0;
  for (size_t n = 0; n < a.size(); ++n) {
    const double difference = double{a[n]} - double{b[n]};
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

void PowerSums::Add(const PowerSums& other) {
  CHECK(other.origin_ == origin_);
  Add(other.count_, other.first_, other.second_, other.third_);
}

void PowerSums::Add(int64_t count, double first, double second, double third) {
  count_ += count;
  first_ += first;
  second_ += second;
  third_ += third;
}

double PowerSums::Mean() const { return origin_ + first_ / static_cast<double>(count_); }

double PowerSums::Variance() const {
  const double n = static_cast<double>(count_), mean = first_ / n;
  return std::max(0.0, second_ / n - mean * mean);
}

double PowerSums::Skewness() const {
  const double variance = Variance(), rounding = std::numeric_limits<float>::epsilon() * Mean();
  if (!(variance > rounding * rounding)) return std::numeric_limits<double>::quiet_NaN();
  const double n = static_cast<double>(count_), mean = first_ / n;
  const double central = third_ / n - 3 * mean * second_ / n + 2 * mean * mean * mean;
  return central / (variance * std::sqrt(variance));
}

}  // namespace attnd
