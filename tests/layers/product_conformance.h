// Products of layers on a GPU, on tensor cores and beside them, against sums in float64. Tests
// instantiate ProductConformance with the device that they have.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/layers/conformance_device.h"

namespace attnd {

// Products of all layouts and results, of sizes in tiles and beside them, in calls of any rows: the
// same numbers on devices that promise the same bits.
std::vector<double> NumbersOfProducts(cuda::CudaBackend& engine, ElementType element);

class ProductConformance : public testing::TestWithParam<ConformanceDevice> {};
// Products of float32, on tensor cores or beside them.
class FloatProductConformance : public testing::TestWithParam<ConformanceDevice> {};

}  // namespace attnd
