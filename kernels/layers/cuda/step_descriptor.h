// A step of an optimizer on one tensor as its kernel reads it. A pure function.
#pragma once

#include <cstdint>

#include "kernels/dense/dense_params.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {

// `packed`: of the tensor's matrix, or nothing.
StepDesc StepDescOf(const ModuleDevice::WeightStep& step, const DenseTensor& packed,
                    int32_t first_block);

}  // namespace attnd
