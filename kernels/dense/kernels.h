// The kernels of this folder, for what compiles them.
#pragma once

#include "kernels/dense/chain.h"
#include "kernels/dense/column_sums.h"
#include "kernels/dense/norm.h"
#include "kernels/dense/numbers.h"
#include "kernels/dense/optimizer.h"
#include "kernels/dense/plain_product.h"
#include "kernels/dense/rotary.h"
