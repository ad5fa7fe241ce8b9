#include "server/call.h"

namespace attnd {

absl::string_view TensorName(Tensor tensor) {
  constexpr absl::string_view kNames[kTensors] = {"mask_bits", "bias", "k",      "v",     "q",
                                                  "lse",       "o",    "d_o",    "d_lse", "d_k",
                                                  "d_v",       "d_q",  "d_bias", "d_sink"};
  return kNames[static_cast<int>(tensor)];
}

TensorList InputsOf(const Problem& p, Direction direction) {
  int64_t element = ElementBytes(p.element);
  TensorList list;
  if (p.bool_mask) list.push_back({Tensor::kMaskBits, p.bool_mask->bytes()});
  if (p.bias) {
    list.push_back({Tensor::kBias, p.bias->shape.elements() * ElementBytes(p.bias->element)});
  }
  list.push_back({Tensor::kK, p.KeyElements() * element});
  list.push_back({Tensor::kV, p.ValueElements() * element});
  list.push_back({Tensor::kQ, p.QueryElements() * element});
  if (direction == Direction::kForward) return list;
  list.push_back({Tensor::kLse, p.LseElements() * int64_t{sizeof(float)}});
  list.push_back({Tensor::kO, p.OutputElements() * element});
  list.push_back({Tensor::kDO, p.OutputElements() * element});
  return list;
}

TensorList OutputsOf(const Problem& p, Direction direction) {
  int64_t element = ElementBytes(p.element);
  TensorList list;
  if (direction == Direction::kForward) {
    list.push_back({Tensor::kLse, p.LseElements() * int64_t{sizeof(float)}});
    list.push_back({Tensor::kO, p.OutputElements() * element});
    return list;
  }
  list.push_back({Tensor::kDK, p.KeyElements() * element});
  list.push_back({Tensor::kDV, p.ValueElements() * element});
  list.push_back({Tensor::kDQ, p.QueryElements() * element});
  if (p.bias && p.bias->want_gradient) {
    list.push_back({Tensor::kDBias, p.bias->shape.elements() * int64_t{sizeof(float)}});
  }
  if (p.denominator == DenominatorKind::kSink) {
    list.push_back({Tensor::kDSink, p.batch * p.q_heads * int64_t{sizeof(float)}});
  }
  return list;
}

void AttentionCall::PlaceInSharedMemory(SharedTensors tensors) {
  parts_->shared = std::move(tensors);
  parts_->flops = Flops(problem(), direction());
}

}  // namespace attnd
