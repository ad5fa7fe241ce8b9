#include "server/wire/decode_tensors.h"

#include "proto/attnd/v1/attention.pb.h"

namespace attnd {
namespace {

using BackwardFields = v1::BackwardRequest;
static_assert(static_cast<int>(BackwardFields::kMaskBitsFieldNumber) ==
              static_cast<int>(v1::ForwardRequest::kMaskBitsFieldNumber));
static_assert(static_cast<int>(BackwardFields::kKFieldNumber) ==
              static_cast<int>(v1::ForwardRequest::kKFieldNumber));
static_assert(v1::TENSOR_NAME_MASK_BITS == static_cast<int>(Tensor::kMaskBits));
static_assert(v1::TENSOR_NAME_D_LSE == static_cast<int>(Tensor::kDLse));
static_assert(v1::TENSOR_NAME_D_SINK == kTensors);
static_assert(v1::TENSOR_NAME_MASK_DATA == kMaskDataId);
static_assert(static_cast<int>(BackwardFields::kMaskDataFieldNumber) ==
              static_cast<int>(v1::ForwardRequest::kMaskDataFieldNumber));

struct OnTheWire {
  absl::string_view name;
  int request_field, reply_field;
};
constexpr OnTheWire kTable[kMaskDataId + 1] = {
    {"", 0, 0},
    {"mask_bits", BackwardFields::kMaskBitsFieldNumber, 0},
    {"bias", BackwardFields::kBiasFieldNumber, 0},
    {"k", BackwardFields::kKFieldNumber, 0},
    {"v", BackwardFields::kVFieldNumber, 0},
    {"q", BackwardFields::kQFieldNumber, 0},
    {"lse", BackwardFields::kLseFieldNumber, v1::ForwardResponse::kLseFieldNumber},
    {"o", BackwardFields::kOFieldNumber, v1::ForwardResponse::kOFieldNumber},
    {"d_o", BackwardFields::kDOFieldNumber, 0},
    {"d_lse", BackwardFields::kDLseFieldNumber, 0},
    {"d_k", 0, v1::BackwardResponse::kDKFieldNumber},
    {"d_v", 0, v1::BackwardResponse::kDVFieldNumber},
    {"d_q", 0, v1::BackwardResponse::kDQFieldNumber},
    {"d_bias", 0, v1::BackwardResponse::kDBiasFieldNumber},
    {"d_sink", 0, v1::BackwardResponse::kDSinkFieldNumber},
    {"mask_data", BackwardFields::kMaskDataFieldNumber, 0},
};

TensorSpec Input(int id, int64_t bytes) {
  return {.id = id, .field = kTable[id].request_field, .name = kTable[id].name, .bytes = bytes};
}

TensorSpec Output(int id, int64_t bytes) {
  return {.id = id,
          .field = kTable[id].reply_field,
          .name = kTable[id].name,
          .role = TensorUse::kOutput,
          .bytes = bytes};
}

int64_t LseBytes(const Problem& p) { return p.LseElements() * int64_t{sizeof(float)}; }

}  // namespace

absl::string_view TensorName(int id) { return kTable[id].name; }
int RequestField(int id) { return kTable[id].request_field; }

TensorList AttentionInputs(const Problem& p, Direction direction, bool on_residual) {
  const int64_t element = ElementBytes(p.element);
  TensorList list;
  if (p.bool_mask) list.push_back(Input(Tensor::kMaskBits, p.bool_mask->bytes()));
  if (p.bias) {
    list.push_back(Input(Tensor::kBias, p.bias->shape.elements() * ElementBytes(p.bias->element)));
  }
  list.push_back(Input(Tensor::kK, p.KeyElements() * element));
  list.push_back(Input(Tensor::kV, p.ValueElements() * element));
  list.push_back(Input(Tensor::kQ, p.QueryElements() * element));
  if (direction == Direction::kForward) return list;
  list.push_back(Input(Tensor::kLse, LseBytes(p)));
  list.push_back(Input(Tensor::kO, p.OutputElements() * element));
  if (on_residual) {
    for (TensorSpec& tensor : list) tensor.role = TensorUse::kKept;
  }
  list.push_back(Input(Tensor::kDO, p.OutputElements() * element));
  return list;
}

TensorSpec MaskDataInput(int64_t bytes) { return Input(kMaskDataId, bytes); }

TensorSpec LseGradient(const Problem& p) { return Input(Tensor::kDLse, LseBytes(p)); }

void AddAttentionOutputs(const Problem& p, Direction direction, bool want_lse, TensorList& list) {
  const int64_t element = ElementBytes(p.element);
  if (direction == Direction::kForward) {
    list.push_back(Output(Tensor::kLse, LseBytes(p)));
    list.back().wanted = want_lse;
    list.push_back(Output(Tensor::kO, p.OutputElements() * element));
    return;
  }
  list.push_back(Output(Tensor::kDK, p.KeyElements() * element));
  list.push_back(Output(Tensor::kDV, p.ValueElements() * element));
  list.push_back(Output(Tensor::kDQ, p.QueryElements() * element));
  if (p.bias && p.bias->want_gradient) {
    list.push_back(Output(Tensor::kDBias, p.bias->shape.elements() * int64_t{sizeof(float)}));
  }
  if (p.denominator == DenominatorKind::kSink) {
    list.push_back(Output(Tensor::kDSink, p.batch * p.q_heads * int64_t{sizeof(float)}));
  }
}

}  // namespace attnd
