// What an engine is given of a call, or of some of its parts (call_parts.h). Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stop_token>

#include "attention/problem.h"
#include "kernels/backend.h"
#include "server/staged_tensors.h"

namespace attnd {

// What the calls of both directions have in common.
template <class Call>
Call EngineCall(const Problem& problem, const TensorPlaces& at, std::byte* workspace,
                const std::stop_token& stop) {
  Call call;
  call.problem = &problem;
  call.q = at[Tensor::kQ];
  call.k = at[Tensor::kK];
  call.v = at[Tensor::kV];
  call.mask_bits = reinterpret_cast<const uint8_t*>(at[Tensor::kMaskBits]);
  call.bias = at[Tensor::kBias];
  call.o = at[Tensor::kO];
  call.lse = at.floats(Tensor::kLse);
  call.workspace = workspace;
  call.stop = stop;
  return call;
}

inline ForwardCall EngineForward(const Problem& problem, const TensorPlaces& at,
                                 std::byte* workspace, const std::stop_token& stop) {
  return EngineCall<ForwardCall>(problem, at, workspace, stop);
}

inline BackwardCall EngineBackward(const Problem& problem, const TensorPlaces& at,
                                   std::byte* workspace, const std::stop_token& stop) {
  BackwardCall call = EngineCall<BackwardCall>(problem, at, workspace, stop);
  call.d_o = at[Tensor::kDO];
  call.d_lse = at.floats(Tensor::kDLse);
  call.d_q = at[Tensor::kDQ];
  call.d_k = at[Tensor::kDK];
  call.d_v = at[Tensor::kDV];
  call.d_bias = at.floats(Tensor::kDBias);
  call.d_sink = at.floats(Tensor::kDSink);
  return call;
}

}  // namespace attnd
