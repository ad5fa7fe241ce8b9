// The numbers that payloads have on the wire: fields of the request and reply messages, and what a
// chunk of a streamed call is named by.
#pragma once

#include "proto/attnd/v1/attention.pb.h"
#include "server/call.h"

namespace attnd {

// Of ForwardRequest and BackwardRequest, which agree.
constexpr int RequestField(Tensor tensor) {
  switch (tensor) {
    case Tensor::kMaskBits:
      return v1::BackwardRequest::kMaskBitsFieldNumber;
    case Tensor::kBias:
      return v1::BackwardRequest::kBiasFieldNumber;
    case Tensor::kK:
      return v1::BackwardRequest::kKFieldNumber;
    case Tensor::kV:
      return v1::BackwardRequest::kVFieldNumber;
    case Tensor::kQ:
      return v1::BackwardRequest::kQFieldNumber;
    case Tensor::kLse:
      return v1::BackwardRequest::kLseFieldNumber;
    case Tensor::kO:
      return v1::BackwardRequest::kOFieldNumber;
    case Tensor::kDO:
      return v1::BackwardRequest::kDOFieldNumber;
    default:
      return v1::BackwardRequest::kDLseFieldNumber;
  }
}
static_assert(static_cast<int>(v1::ForwardRequest::kKFieldNumber) ==
              static_cast<int>(v1::BackwardRequest::kKFieldNumber));

// Of ForwardResponse (lse, o) and BackwardResponse (the rest).
constexpr int ReplyField(Tensor tensor) {
  switch (tensor) {
    case Tensor::kLse:
      return v1::ForwardResponse::kLseFieldNumber;
    case Tensor::kO:
      return v1::ForwardResponse::kOFieldNumber;
    case Tensor::kDK:
      return v1::BackwardResponse::kDKFieldNumber;
    case Tensor::kDV:
      return v1::BackwardResponse::kDVFieldNumber;
    case Tensor::kDQ:
      return v1::BackwardResponse::kDQFieldNumber;
    case Tensor::kDBias:
      return v1::BackwardResponse::kDBiasFieldNumber;
    default:
      return v1::BackwardResponse::kDSinkFieldNumber;
  }
}

}  // namespace attnd
