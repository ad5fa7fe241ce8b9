// Products of layers on a GPU, on tensor cores and beside them, against sums in float64. Tests
// instantiate ProductConformance with the device that they have.
#pragma once

#include <gtest/gtest.h>

#include "modules/cuda/conformance_device.h"

namespace attnd {

class ProductConformance : public testing::TestWithParam<ConformanceDevice> {};

}  // namespace attnd
