// Makes an engine's call of an admitted one whose tensors have landed. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stop_token>

#include "kernels/backend.h"
#include "server/admission/admission.h"
#include "server/admission/staged_tensors.h"
#include "server/call/attention_tensors.h"

namespace attnd {

inline float* Floats(std::byte* data) { return reinterpret_cast<float*>(data); }

// Fills in what the calls of both directions have in common.
template <class Call>
Call EngineCall(const AdmittedCall& admitted, const std::stop_token& stop) {
  const TensorPlaces& at = admitted.staged().at;
  Call call;
  call.problem = &admitted.call().problem();
  call.q = at[Tensor::kQ];
  call.k = at[Tensor::kK];
  call.v = at[Tensor::kV];
  call.mask_bits = reinterpret_cast<const uint8_t*>(at[Tensor::kMaskBits]);
  call.bias = at[Tensor::kBias];
  call.o = at[Tensor::kO];
  call.lse = Floats(at[Tensor::kLse]);
  call.workspace = admitted.staged().workspace;
  call.stop = stop;
  return call;
}

inline ForwardCall EngineForward(const AdmittedCall& admitted, const std::stop_token& stop) {
  return EngineCall<ForwardCall>(admitted, stop);
}

inline BackwardCall EngineBackward(const AdmittedCall& admitted, const std::stop_token& stop) {
  const TensorPlaces& at = admitted.staged().at;
  BackwardCall call = EngineCall<BackwardCall>(admitted, stop);
  call.d_o = at[Tensor::kDO];
  call.d_lse = Floats(at[Tensor::kDLse]);
  call.d_q = at[Tensor::kDQ];
  call.d_k = at[Tensor::kDK];
  call.d_v = at[Tensor::kDV];
  call.d_bias = Floats(at[Tensor::kDBias]);
  call.d_sink = Floats(at[Tensor::kDSink]);
  return call;
}

}  // namespace attnd
