// How gradients are added up. Pure but for what they hold; one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "modules/reference/rounding.h"

namespace attnd {

// Sums the gradient of one value over its uses, last use first. Columns that no use names are 0.
class ValueGradient {
 public:
  ValueGradient() = default;
  ValueGradient(int64_t rows, int64_t columns, ElementType element)
      : columns_(columns),
        element_(element),
        values_(rows * columns),
        is_set_(static_cast<size_t>(columns)) {}

  // Adds a use's gradient of columns [first, first + count): `part` is [rows, count]. The first one
  // is taken as it is; each is rounded to the element, and so is each sum.
  void Add(int64_t first, int64_t count, const Numbers& part, const Rounder& round) {
    const int64_t rows = static_cast<int64_t>(values_.size()) / columns_;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t n = 0; n < count; ++n) {
        double& sum = values_[row * columns_ + first + n];
        const double added = round.To(element_, part[row * count + n]);
        sum = is_set_[first + n] ? round.To(element_, sum + added) : added;
      }
    }
    std::fill_n(is_set_.begin() + first, count, true);
  }
  void Add(const Numbers& part, const Rounder& round) { Add(0, columns_, part, round); }

  const Numbers& values() const { return values_; }

 private:
  int64_t columns_ = 0;
  ElementType element_ = ElementType::kFloat32;
  Numbers values_;  // [rows, columns]
  std::vector<bool> is_set_;
};

inline constexpr int64_t kGradientRows = 1024;

// Sums the gradient of one parameter: add_row(row, sum) adds what a row gives to sum. Rows go in
// blocks of kGradientRows from the call's first, and the sum goes on from what `gradient` holds:
// with rounding one float32 addition a block, without row after row.
template <class AddRow>
void AddRows(int64_t rows, const Rounder& round, Numbers& gradient, AddRow&& add_row) {
  if (!round.rounds()) {
    for (int64_t row = 0; row < rows; ++row) add_row(row, gradient);
    return;
  }
  for (int64_t begin = 0; begin < rows; begin += kGradientRows) {
    Numbers block(gradient.size());
    for (int64_t row = begin; row < std::min(rows, begin + kGradientRows); ++row) {
      add_row(row, block);
    }
    for (size_t n = 0; n < block.size(); ++n) {
      const double sum = gradient[n] + round.To(ElementType::kFloat32, block[n]);
      gradient[n] = round.To(ElementType::kFloat32, sum);
    }
  }
}

}  // namespace attnd
