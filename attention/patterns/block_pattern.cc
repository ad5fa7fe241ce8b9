#include "attention/patterns/block_pattern.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

absl::Status Invalid(const absl::string_view field, const absl::string_view expected,
                     const absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: expected %s, got %s", field, expected, got));
}

// Pattern: which blocks of [blocks, blocks] are kept.
class Pattern {
 public:
  Pattern(absl::Span<const float> pooled, int64_t blocks)
      : pooled_(pooled), blocks_(blocks), kept_(pooled.size()) {}

  void KeepFlood(float threshold) {
    for (int64_t n = 0; n < blocks_; ++n) {
      Walk(0, n, threshold);
      Walk(n, 0, threshold);
    }
  }

  void KeepLargest(int64_t count) {
    for (const int64_t n : Largest(0, static_cast<int64_t>(kept_.size()), count)) kept_[n] = true;
  }

  void KeepDiagonal() {
    for (int64_t n = 0; n < blocks_; ++n) kept_[n * blocks_ + n] = true;
  }

  // Adds the largest blocks of rows that keep fewer than `least`.
  void FillRows(int64_t least) {
    for (int64_t row = 0; row < blocks_; ++row) {
      const int64_t begin = row * blocks_, end = begin + blocks_;
      int64_t missing = least - std::count(kept_.begin() + begin, kept_.begin() + end, true);
      if (missing <= 0) continue;
      for (const int64_t n : Largest(begin, end, blocks_)) {
        if (missing == 0) break;
        if (kept_[n]) continue;
        kept_[n] = true;
        --missing;
      }
    }
  }

  BlockList List(int64_t block) const {
    BlockList list;
    list.bq = list.bk = static_cast<uint32_t>(block);
    list.indptr.push_back(0);
    for (int64_t row = 0; row < blocks_; ++row) {
      for (int64_t column = 0; column < blocks_; ++column) {
        if (kept_[row * blocks_ + column]) list.indices.push_back(static_cast<uint32_t>(column));
      }
      list.indptr.push_back(static_cast<uint32_t>(list.indices.size()));
    }
    return list;
  }

 private:
  float At(int64_t row, int64_t column) const {
    return row < blocks_ && column < blocks_ ? pooled_[row * blocks_ + column] : 0.0f;
  }

  // The first block is not kept for being the first. Beside the map lie zeros. Where the block
  // below and the one to the right are equal the latter is taken, where one equals the diagonal's
  // the diagonal's.
  void Walk(int64_t row, int64_t column, float threshold) {
    for (;;) {
      const float below = At(row + 1, column), right = At(row, column + 1),
                  diagonal = At(row + 1, column + 1);
      const bool down = below > right;
      if ((down ? below : right) > diagonal) {
        down ? ++row : ++column;
      } else {
        ++row;
        ++column;
      }
      if (row >= blocks_ || column >= blocks_) return;
      const float value = At(row, column);
      if (value > threshold && value > 0) kept_[row * blocks_ + column] = true;
    }
  }

  // Places of the `count` largest in [begin, end), largest first, equal ones in their order.
  std::vector<int64_t> Largest(int64_t begin, int64_t end, int64_t count) const {
    std::vector<int64_t> places(static_cast<size_t>(end - begin));
    std::iota(places.begin(), places.end(), begin);
    std::stable_sort(places.begin(), places.end(),
                     [&](int64_t a, int64_t b) { return pooled_[a] > pooled_[b]; });
    places.resize(static_cast<size_t>(std::min<int64_t>(count, end - begin)));
    return places;
  }

  const absl::Span<const float> pooled_;
  const int64_t blocks_;
  std::vector<bool> kept_;
};

// How many blocks kTopK takes. 0: none is left.
int64_t LargestCount(int64_t blocks, const PatternOptions& options) {
  const double diagonal = options.force_diagonal ? static_cast<double>(blocks) : 0;
  const double n = static_cast<double>(blocks);
  return static_cast<int64_t>(n * n * options.density - diagonal);
}

absl::Status CheckOptions(int64_t blocks, const PatternOptions& options) {
  if (options.min_blocks_per_row < 0 || options.min_blocks_per_row > blocks) {
    return Invalid("min_blocks_per_row", absl::StrFormat("0..%d", blocks),
                   absl::StrFormat("%d", options.min_blocks_per_row));
  }
  if (options.rule == PatternRule::kFlood) {
    if (options.quantile >= 0 && options.quantile <= 1) return absl::OkStatus();
    return Invalid("quantile", "0..1", absl::StrFormat("%g", options.quantile));
  }
  if (!(options.density > 0 && options.density <= 1)) {
    return Invalid("density", "above 0, at most 1", absl::StrFormat("%g", options.density));
  }
  if (LargestCount(blocks, options) <= 0) {
    return Invalid(
        "density",
        absl::StrFormat("at least one block of %d beside a forced diagonal", blocks * blocks),
        absl::StrFormat("%g", options.density));
  }
  return absl::OkStatus();
}

absl::Status CheckMap(absl::Span<const float> pooled, int64_t blocks) {
  if (static_cast<int64_t>(pooled.size()) != blocks * blocks) {
    return Invalid("pooled", absl::StrFormat("%d × %d averages", blocks, blocks),
                   absl::StrFormat("%d", pooled.size()));
  }
  for (size_t n = 0; n < pooled.size(); ++n) {
    if (std::isfinite(pooled[n])) continue;
    return Invalid("pooled", "finite averages",
                   absl::StrFormat("%g in block (%d, %d)", pooled[n], n / blocks, n % blocks));
  }
  return absl::OkStatus();
}

}  // namespace

float Quantile(std::vector<float> values, double quantile) {
  std::sort(values.begin(), values.end());
  const float rank = static_cast<float>(quantile) * static_cast<float>(values.size() - 1);
  const size_t below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, values.size() - 1);
  const float weight = rank - static_cast<float>(below);
  const float step = values[above] - values[below];
  return weight < 0.5f ? values[below] + weight * step : values[above] - step * (1.0f - weight);
}

absl::StatusOr<BlockList> BuildBlockPattern(absl::Span<const float> pooled, int64_t blocks,
                                            int64_t block, const PatternOptions& options) {
  constexpr int64_t kMaxBlocks = 4096;
  if (blocks < 1 || blocks > kMaxBlocks) {
    return Invalid("blocks", absl::StrFormat("1..%d", kMaxBlocks), absl::StrFormat("%d", blocks));
  }
  if (block < 1 || block > kMaxMaskLength) {
    return Invalid("block", absl::StrFormat("1..%d", kMaxMaskLength), absl::StrFormat("%d", block));
  }
  RETURN_IF_ERROR(CheckOptions(blocks, options));
  RETURN_IF_ERROR(CheckMap(pooled, blocks));
  Pattern pattern(pooled, blocks);
  if (options.rule == PatternRule::kFlood) {
    pattern.KeepFlood(Quantile({pooled.begin(), pooled.end()}, options.quantile));
  } else {
    pattern.KeepLargest(LargestCount(blocks, options));
  }
  if (options.force_diagonal) pattern.KeepDiagonal();
  pattern.FillRows(options.min_blocks_per_row);
  return pattern.List(block);
}

}  // namespace attnd
