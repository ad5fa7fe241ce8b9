// The ids of attention's tensors (TensorSpec::id), for its decoder and its engine call.
#pragma once

namespace attnd {

// Ids, as v1::TensorName numbers them: first those that may be inputs, in the order in which they
// travel.
struct Tensor {
  enum : int {
    kMaskBits = 1,
    kBias,
    kK,
    kV,
    kQ,
    kLse,  // of forward's outputs too, as is kO
    kO,
    kDO,
    kDLse,
    kDK,
    kDV,
    kDQ,
    kDBias,
    kDSink,
  };
};
inline constexpr int kTensors = 14;
// Lists of a mask travel like a tensor, before the others, and are none.
inline constexpr int kMaskDataId = kTensors + 1;

}  // namespace attnd
