// The kernels of this folder, and those of other folders that its GPUs run.
#pragma once

#include "kernels/sm90/backward.h"
#include "kernels/sm90/dropout_bits.h"
#include "kernels/sm90/forward.h"
#include "kernels/sm90/gradient_product.h"
#include "kernels/sm90/query_gradient.h"
#include "kernels/sm90/wide_product.h"
