// The kernels of this folder, and those of other folders that its GPUs run.
#pragma once

#include "kernels/dense/kernels.h"
#include "kernels/rules/capture_sums.h"
#include "kernels/rules/mask_tiles.h"
#include "kernels/rules/merge_runs.h"
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm70/backward.h"
#include "kernels/sm70/capture.h"
#include "kernels/sm70/forward.h"
#include "kernels/sm70/keep_rows.h"
#include "kernels/sm70/norm_sums.h"
#include "kernels/sm70/product.h"
#include "kernels/sm70/split_backward.h"
