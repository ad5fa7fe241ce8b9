// Computes from an averaged attention map A [rows, keys], float32 in row-major order: the pooled
// map from which block patterns are built, the distance of two maps, the moments that say whether
// attention has settled. Sums are float64 in a fixed order. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace attnd {

// The blocks of a map. The last row and column of blocks may be smaller: averages there are over
// the entries that exist.
struct MapShape {
  int64_t rows = 0, keys = 0, block = 0;
  int64_t row_blocks() const { return (rows + block - 1) / block; }
  int64_t key_blocks() const { return (keys + block - 1) / block; }
  int64_t BlockEntries(int64_t row_block, int64_t key_block) const;
};

// The average of each block from its sum, both [row_blocks, key_blocks].
std::vector<float> BlockAverages(const MapShape& shape, absl::Span<const double> sums);

// The average of each block, [row_blocks, key_blocks].
std::vector<float> PoolBlocks(const MapShape& shape, absl::Span<const float> map);

// The average of each block of the map that a convolution with the identity of `diagonal` ×
// `diagonal` (odd; zeros around the map) makes: entry (i, j) becomes Σ_t A[i + t, j + t], |t| ≤
// diagonal / 2. (SPION, arXiv 2309.12578, uses 31)
inline constexpr int kSpionDiagonal = 31;
std::vector<float> PoolDiagonals(const MapShape& shape, absl::Span<const float> map,
                                 int diagonal = kSpionDiagonal);

// ‖a − b‖_F; the maps have one size.
double FrobeniusDistance(absl::Span<const float> a, absl::Span<const float> b);

// PowerSums: Σ(x − origin), its squares and cubes. Near the mean an origin keeps the moments free
// of cancellation: rows of an attention map sum to 1, so 1 / keys.
class PowerSums {
 public:
  explicit PowerSums(double origin) : origin_(origin) {}

  void Add(float x) {
    const double distance = x - origin_;
    ++count_;
    first_ += distance;
    second_ += distance * distance;
    third_ += distance * distance * distance;
  }
  void Add(const PowerSums& other);  // of the same origin
  // Adds the sums of `count` entries.
  void Add(int64_t count, double first, double second, double third);

  double Mean() const;
  double Variance() const;  // of the entries, not of a sample: divided by their count
  // The average of ((x − mean) / σ)³ (SAT, doi 10.1109/ACCESS.2024.3425638). NaN where the entries
  // are equal but for float32's rounding.
  double Skewness() const;

 private:
  double origin_;
  int64_t count_ = 0;
  double first_ = 0, second_ = 0, third_ = 0;
};

}  // namespace attnd
