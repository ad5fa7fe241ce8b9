#include "client/types/tensors.h"

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attnd {
namespace {

absl::Status MissingTensor(absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected a tensor, got a null pointer"));
}

struct NamedPointer {
  absl::string_view name;
  const void* pointer;
  bool needed;
};

absl::Status CheckPointers(std::initializer_list<NamedPointer> pointers) {
  for (const NamedPointer& p : pointers) {
    if (p.needed && p.pointer == nullptr) return MissingTensor(p.name);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTensors(const Problem& p, const ForwardTensors& in, const ForwardOutputs& out) {
  return CheckPointers({{"q", in.q, true},
                        {"k", in.k, true},
                        {"v", in.v, true},
                        {"mask_bits", in.mask_bits, p.bool_mask.has_value()},
                        {"bias", in.bias, p.bias.has_value()},
                        {"o", out.o, true}});
}

absl::Status CheckTensors(const Problem& p, const BackwardTensors& in, const BackwardOutputs& out) {
  return CheckPointers({{"q", in.q, true},
                        {"k", in.k, true},
                        {"v", in.v, true},
                        {"mask_bits", in.mask_bits, p.bool_mask.has_value()},
                        {"bias", in.bias, p.bias.has_value()},
                        {"o", in.o, true},
                        {"lse", in.lse, true},
                        {"d_o", in.d_o, true},
                        {"d_q", out.d_q, true},
                        {"d_k", out.d_k, true},
                        {"d_v", out.d_v, true},
                        {"d_bias", out.d_bias, p.bias && p.bias->want_gradient},
                        {"d_sink", out.d_sink, p.denominator == DenominatorKind::kSink}});
}

}  // namespace attnd
