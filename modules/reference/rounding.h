// Rounder: where the reference rounds. Either nowhere, so that results are exact to float64, or
// where the contract says: after each op and each gradient, to the value's element by way of
// float32, and to float32 where a parameter's gradient is added. What lies between two such points
// is float64 in both, so an engine may differ by its own sums and functions alone. A value; any
// thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/element.h"

namespace attnd {

using Numbers = std::vector<double>;  // row-major [rows, columns]

enum class Rounding : uint8_t { kExact, kElements };

class Rounder {
 public:
  explicit Rounder(Rounding rounding) : rounds_(rounding == Rounding::kElements) {}

  double To(ElementType element, double value) const {
    if (!rounds_) return value;
    uint8_t stored[4];
    StoreElement(element, stored, 0, static_cast<float>(value));
    return LoadElement(element, stored, 0);
  }
  void To(ElementType element, Numbers& values) const {
    if (!rounds_) return;
    for (double& value : values) value = To(element, value);
  }
  bool rounds() const { return rounds_; }

 private:
  bool rounds_;
};

}  // namespace attnd
