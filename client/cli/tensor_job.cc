#include "client/cli/tensor_job.h"

#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

absl::Status WrongTensor(const std::string& name, absl::string_view expected,
                         absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected ", expected, ", got ", got));
}

absl::StatusOr<ElementType> ElementOf(const std::string& name, const StoredTensor& tensor) {
  for (ElementType element :
       {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    if (tensor.dtype == DtypeName(element)) return element;
  }
  return WrongTensor(name, "F16, BF16 or F32", tensor.dtype);
}

template <class T>
std::vector<T> ValuesOf(const StoredTensor& tensor) {
  std::vector<T> values(static_cast<size_t>(tensor.elements()));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

// An optional list of integers.
absl::Status ReadIntegers(const SafetensorsFile& file, const std::string& name,
                          std::vector<int32_t>& out) {
  const StoredTensor* tensor = file.Find(name);
  if (tensor == nullptr) return absl::OkStatus();
  if (tensor->dtype == "I32") {
    out = ValuesOf<int32_t>(*tensor);
    return absl::OkStatus();
  }
  if (tensor->dtype != "I64") return WrongTensor(name, "I32 or I64", tensor->dtype);
  out.clear();
  for (int64_t value : ValuesOf<int64_t>(*tensor)) {
    if (value < INT32_MIN || value > INT32_MAX) {
      return WrongTensor(name, "numbers of 32 bits", absl::StrCat(value));
    }
    out.push_back(static_cast<int32_t>(value));
  }
  return absl::OkStatus();
}

absl::Status ReadFloats(const SafetensorsFile& file, const std::string& name,
                        std::vector<float>& out) {
  const StoredTensor* tensor = file.Find(name);
  if (tensor == nullptr) return absl::OkStatus();
  if (tensor->dtype != "F32") return WrongTensor(name, "F32", tensor->dtype);
  out = ValuesOf<float>(*tensor);
  return absl::OkStatus();
}

absl::StatusOr<BroadcastShape> BroadcastOf(const std::string& name, const StoredTensor& tensor) {
  if (tensor.shape.size() != 4)
    return WrongTensor(name, "four dimensions", ShapeText(tensor.shape));
  return BroadcastShape{tensor.shape[0], tensor.shape[1], tensor.shape[2], tensor.shape[3]};
}

// Bytes, not 0 = attend, to rows of bits.
std::vector<uint8_t> PackBits(const StoredTensor& tensor, const BoolMask& mask) {
  std::vector<uint8_t> bits(static_cast<size_t>(mask.bytes()));
  int64_t columns = mask.shape.columns;
  for (int64_t n = 0; n < tensor.elements(); ++n) {
    if (tensor.data[n] == std::byte{0}) continue;
    int64_t row = n / columns, column = n % columns;
    bits[row * mask.row_bytes() + (column >> 3)] |= static_cast<uint8_t>(1 << (column & 7));
  }
  return bits;
}

// The dimensions of a tensor of the layout, dim last.
std::vector<int64_t> ShapeIn(Layout layout, int64_t batch, int64_t heads, int64_t length,
                             int64_t dim) {
  switch (layout) {
    case Layout::kBhld:
      return {batch, heads, length, dim};
    case Layout::kBlhd:
      return {batch, length, heads, dim};
    case Layout::kPackedThd:
      return {length, heads, dim};
    case Layout::kPackedHtd:
      return {heads, length, dim};
  }
  return {};
}

// A misspelt name would change the mathematics in silence.
absl::Status CheckNames(const SafetensorsFile& file) {
  constexpr absl::string_view kNames[] = {
      "q", "k",   "v",    "bias",         "mask",         "kv_lengths",   "offsets",    "dout",
      "o", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sink_logits"};
  for (const auto& [name, tensor] : file.tensors()) {
    if (absl::c_linear_search(kNames, name)) continue;
    return WrongTensor(name, absl::StrCat("a name of ", absl::StrJoin(kNames, ", ")), name);
  }
  if (file.Find("dlse") != nullptr && file.Find("dout") == nullptr) {
    return WrongTensor("dlse", "dout beside it", "none");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TensorJob> TensorJob::Make(const SafetensorsFile& file,
                                          const ProblemFlags& command_line) {
  RETURN_IF_ERROR(CheckNames(file));
  TensorJob job(file);
  ProblemFlags flags = command_line;
  RETURN_IF_ERROR(flags.Merge(file.metadata()));
  RETURN_IF_ERROR(job.ReadOffsets());
  RETURN_IF_ERROR(flags.Apply(job.p_));
  RETURN_IF_ERROR(job.ReadSizes());
  RETURN_IF_ERROR(job.ReadLists());
  // Sizes come from shapes: before masks are unpacked they must be sane.
  RETURN_IF_ERROR(Validate(job.p_));
  RETURN_IF_ERROR(job.ReadMaskAndBias());
  RETURN_IF_ERROR(Validate(job.p_));
  RETURN_IF_ERROR(job.CheckInputs());
  return job;
}

absl::Status TensorJob::ReadOffsets() {
  if (file_->Find("offsets") == nullptr) return absl::OkStatus();
  p_.alignment = Alignment::kOffsets;
  return ReadIntegers(*file_, "offsets", p_.offsets);
}

absl::Status TensorJob::ReadSizes() {
  size_t rank = IsPacked(p_.layout) ? 3 : 4;
  for (const char* name : {"q", "k", "v"}) {
    const StoredTensor* tensor = file_->Find(name);
    if (tensor == nullptr) return WrongTensor(name, "a tensor in the file", "none");
    if (tensor->shape.size() != rank) {
      return WrongTensor(name, absl::StrCat(rank, " dimensions in this layout"),
                         ShapeText(tensor->shape));
    }
  }
  const std::vector<int64_t>&q = file_->Find("q")->shape, &k = file_->Find("k")->shape;
  bool heads_first = p_.layout == Layout::kBhld || p_.layout == Layout::kPackedHtd;
  size_t heads = heads_first ? rank - 3 : rank - 2, length = heads_first ? rank - 2 : rank - 3;
  p_.q_heads = q[heads];
  p_.kv_heads = k[heads];
  p_.q_len = q[length];
  p_.kv_len = k[length];
  p_.qk_head_dim = q[rank - 1];
  p_.v_head_dim = file_->Find("v")->shape[rank - 1];
  if (rank == 4) p_.batch = q[0];
  ASSIGN_OR_RETURN(p_.element, ElementOf("q", *file_->Find("q")));
  return absl::OkStatus();
}

absl::Status TensorJob::ReadLists() {
  RETURN_IF_ERROR(ReadIntegers(*file_, "kv_lengths", p_.kv_lengths));
  RETURN_IF_ERROR(ReadIntegers(*file_, "cu_seqlens_q", p_.cu_seqlens_q));
  RETURN_IF_ERROR(ReadIntegers(*file_, "cu_seqlens_k", p_.cu_seqlens_k));
  RETURN_IF_ERROR(ReadFloats(*file_, "alibi_slopes", p_.alibi_slopes));
  RETURN_IF_ERROR(ReadFloats(*file_, "sink_logits", p_.sink_logits));
  if (!p_.sink_logits.empty()) {
    if (p_.denominator == DenominatorKind::kZeroRest) {
      return WrongTensor("sink_logits", "none with the denominator zero_rest", "some");
    }
    p_.denominator = DenominatorKind::kSink;
  }
  if (!IsPacked(p_.layout)) return absl::OkStatus();
  if (p_.cu_seqlens_q.size() < 2)
    return WrongTensor("cu_seqlens_q", "a tensor of batch + 1", "none");
  p_.batch = static_cast<int64_t>(p_.cu_seqlens_q.size()) - 1;
  return absl::OkStatus();
}

absl::Status TensorJob::ReadMaskAndBias() {
  if (const StoredTensor* bias = file_->Find("bias")) {
    ASSIGN_OR_RETURN(ElementType element, ElementOf("bias", *bias));
    ASSIGN_OR_RETURN(BroadcastShape shape, BroadcastOf("bias", *bias));
    p_.bias = Bias{element, shape, has_backward()};
  }
  if (const StoredTensor* mask = file_->Find("mask")) {
    if (mask->dtype != "BOOL" && mask->dtype != "U8") {
      return WrongTensor("mask", "BOOL or U8", mask->dtype);
    }
    ASSIGN_OR_RETURN(BroadcastShape shape, BroadcastOf("mask", *mask));
    p_.bool_mask = BoolMask{shape};
    RETURN_IF_ERROR(Validate(p_));
    mask_bits_ = PackBits(*mask, *p_.bool_mask);
  }
  return absl::OkStatus();
}

absl::Status TensorJob::CheckTensor(const std::string& name, const std::vector<int64_t>& shape,
                                    const std::string& dtype) const {
  const StoredTensor* tensor = file_->Find(name);
  if (tensor == nullptr) return absl::OkStatus();
  if (tensor->shape != shape) return WrongTensor(name, ShapeText(shape), ShapeText(tensor->shape));
  if (tensor->dtype != dtype) return WrongTensor(name, dtype, tensor->dtype);
  return absl::OkStatus();
}

absl::Status TensorJob::CheckInputs() const {
  const std::string& dtype = file_->Find("q")->dtype;
  auto shape = [&](int64_t heads, int64_t length, int64_t dim) {
    return ShapeIn(p_.layout, p_.batch, heads, length, dim);
  };
  RETURN_IF_ERROR(CheckTensor("q", shape(p_.q_heads, p_.q_len, p_.qk_head_dim), dtype));
  RETURN_IF_ERROR(CheckTensor("k", shape(p_.kv_heads, p_.kv_len, p_.qk_head_dim), dtype));
  RETURN_IF_ERROR(CheckTensor("v", shape(p_.kv_heads, p_.kv_len, p_.v_head_dim), dtype));
  RETURN_IF_ERROR(CheckTensor("o", shape(p_.q_heads, p_.q_len, p_.v_head_dim), dtype));
  RETURN_IF_ERROR(CheckTensor("dout", shape(p_.q_heads, p_.q_len, p_.v_head_dim), dtype));
  RETURN_IF_ERROR(CheckTensor("lse", LseShape(), "F32"));
  return CheckTensor("dlse", LseShape(), "F32");
}

std::vector<int64_t> TensorJob::LseShape() const {
  if (IsPacked(p_.layout)) return {p_.q_heads, p_.q_len};
  return {p_.batch, p_.q_heads, p_.q_len};
}

const void* TensorJob::Data(const std::string& name) const {
  auto result = results_.find(name);
  if (result != results_.end()) return result->second.bytes.data();
  const StoredTensor* tensor = file_->Find(name);
  return tensor == nullptr ? nullptr : tensor->data.data();
}

std::vector<std::byte>& TensorJob::NewResult(const std::string& name, const std::string& dtype,
                                             const std::vector<int64_t>& shape) {
  int64_t bytes = dtype == "F32" ? 4 : 2;
  for (int64_t dimension : shape) bytes *= dimension;  // as large as an input: it does not overflow
  Result& result = results_[name];
  result = {dtype, shape, std::vector<std::byte>(static_cast<size_t>(bytes))};
  return result.bytes;
}

absl::Status TensorJob::Run(AttentionClient& client, const CallOptions& options) {
  bool has_forward = file_->Find("o") != nullptr && file_->Find("lse") != nullptr;
  if (!has_forward || !has_backward()) RETURN_IF_ERROR(RunForward(client, options));
  return has_backward() ? RunBackward(client, options) : absl::OkStatus();
}

absl::Status TensorJob::RunForward(AttentionClient& client, const CallOptions& options) {
  const std::string& dtype = file_->Find("q")->dtype;
  std::vector<std::byte>& o =
      NewResult("o", dtype, ShapeIn(p_.layout, p_.batch, p_.q_heads, p_.q_len, p_.v_head_dim));
  std::vector<std::byte>& lse = NewResult("lse", "F32", LseShape());
  ForwardTensors in{Data("q"), Data("k"), Data("v"), mask_bits_.data(), Data("bias")};
  ASSIGN_OR_RETURN(
      receipt_, client.Forward(p_, in, {o.data(), reinterpret_cast<float*>(lse.data())}, options));
  return absl::OkStatus();
}

absl::Status TensorJob::RunBackward(AttentionClient& client, const CallOptions& options) {
  const std::string& dtype = file_->Find("q")->dtype;
  BackwardOutputs out;
  out.d_q = NewResult("dq", dtype, file_->Find("q")->shape).data();
  out.d_k = NewResult("dk", dtype, file_->Find("k")->shape).data();
  out.d_v = NewResult("dv", dtype, file_->Find("v")->shape).data();
  if (p_.bias) {
    out.d_bias =
        reinterpret_cast<float*>(NewResult("dbias", "F32", file_->Find("bias")->shape).data());
  }
  if (p_.denominator == DenominatorKind::kSink) {
    out.d_sink = reinterpret_cast<float*>(NewResult("dsink", "F32", {p_.batch, p_.q_heads}).data());
  }
  BackwardTensors in{.q = Data("q"),
                     .k = Data("k"),
                     .v = Data("v"),
                     .mask_bits = mask_bits_.data(),
                     .bias = Data("bias"),
                     .o = Data("o"),
                     .lse = static_cast<const float*>(Data("lse")),
                     .d_o = Data("dout"),
                     .d_lse = static_cast<const float*>(Data("dlse"))};
  ASSIGN_OR_RETURN(receipt_, client.Backward(p_, in, out, options));
  return absl::OkStatus();
}

std::map<std::string, StoredTensor> TensorJob::Results() const {
  std::map<std::string, StoredTensor> tensors;
  for (const auto& [name, result] : results_) {
    tensors[name] = {result.dtype, result.shape, result.bytes};
  }
  return tensors;
}

}  // namespace attnd
