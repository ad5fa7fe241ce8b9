#include "server/decode.h"

#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/decode_problem.h"
#include "server/encode_fields.h"
#include "server/status_details.h"

namespace attnd {
namespace {

constexpr int kProblemField = v1::ForwardRequest::kProblemFieldNumber;
constexpr int kOptionsField = v1::ForwardRequest::kOptionsFieldNumber;
constexpr int64_t kMaxTokenBytes = 256;
constexpr int kSharedField = v1::ForwardRequest::kSharedMemoryFieldNumber;
static_assert(kSharedField == v1::BackwardRequest::kSharedMemoryFieldNumber);
static_assert(v1::TENSOR_NAME_MASK_BITS == static_cast<int>(Tensor::kMaskBits) + 1);
static_assert(v1::TENSOR_NAME_D_LSE == static_cast<int>(Tensor::kDLse) + 1);
static_assert(v1::TENSOR_NAME_D_SINK == kTensors);
static_assert(kProblemField == v1::BackwardRequest::kProblemFieldNumber);
static_assert(kOptionsField == v1::BackwardRequest::kOptionsFieldNumber);

constexpr Tensor kInputs[] = {Tensor::kMaskBits, Tensor::kBias, Tensor::kK,
                              Tensor::kV,        Tensor::kQ,    Tensor::kLse,
                              Tensor::kO,        Tensor::kDO,   Tensor::kDLse};

// Into `message`, which is empty.
absl::Status ParseRange(const MessageBytes& bytes, ByteRange range, absl::string_view field,
                        google::protobuf::MessageLite& message) {
  MessageBytes::Stream stream(bytes, range);
  google::protobuf::io::CodedInputStream in(&stream);
  if (message.ParseFromCodedStream(&in) && in.ConsumedEntireMessage()) return absl::OkStatus();
  return FieldError(reason::kMalformedMessage, field, "a protobuf message with UTF-8 strings",
                    "bytes that are none");
}

// A problem and its bytes. Most callers repeat theirs, and to check, parse and validate a small one
// again is a tenth of a small call's instructions.
struct SeenProblem {
  std::string bytes;  // empty: none
  Problem problem;
};
constexpr int64_t kMostSeenBytes = 256;

// The last one of this thread.
SeenProblem& LastProblem() {
  thread_local SeenProblem last;
  return last;
}

void Remember(const MessageBytes& message, ByteRange range, const Problem& problem) {
  if (range.size > kMostSeenBytes) return;
  SeenProblem& last = LastProblem();
  last.bytes.clear();
  message.ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
    last.bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  });
  last.problem = problem;
}

// Before the problem is parsed: patterns may be large and would be parsed for nothing.
absl::Status RefuseUnimplemented(const FieldTable& table) {
  bool mask = table.NestedHas(kProblemField, v1::Problem::kMaskFieldNumber);
  if (mask && table.NestedHas(kProblemField, v1::Problem::kBoolMaskFieldNumber)) {
    return FieldError(reason::kBadField, "problem.mask", "one of mask and bool_mask", "both");
  }
  if (mask) {
    return Failure(absl::StatusCode::kUnimplemented, reason::kMaskUnsupported,
                   "problem.mask: mask patterns are not supported by this server; send bool_mask",
                   {{"field", "problem.mask"}});
  }
  return absl::OkStatus();
}

absl::Status DecodeOptions(const MessageBytes& bytes, const FieldTable& table, Direction direction,
                           v1::CallOptions& options) {
  if (!table.Has(kOptionsField)) return absl::OkStatus();
  RETURN_IF_ERROR(ParseRange(bytes, table.range[kOptionsField], "options", options));
  if (options.keep_residual() && direction == Direction::kBackward) {
    return FieldError(reason::kBadField, "options.keep_residual", "false in Backward", "true");
  }
  return absl::OkStatus();
}

absl::Status DecodeProblemIn(const MessageBytes& message, const FieldTable& table,
                             Problem& problem) {
  if (table.known) {
    problem = LastProblem().problem;
    return absl::OkStatus();
  }
  const ByteRange range = table.range[kProblemField];
  v1::Problem wire;
  RETURN_IF_ERROR(ParseRange(message, range, "problem", wire));
  ASSIGN_OR_RETURN(problem, DecodeProblem(wire));
  Remember(message, range, problem);
  return absl::OkStatus();
}

// Empty when there is none. What it opens, if anything, is LeaseTable's to say.
absl::StatusOr<std::string> DecodeToken(const MessageBytes& bytes, const FieldTable& table,
                                        Direction direction) {
  constexpr int kField = v1::BackwardRequest::kResidualTokenFieldNumber;
  std::string token;
  if (direction == Direction::kForward) return token;
  ByteRange range = table.range[kField];
  if (range.size > kMaxTokenBytes) {
    return FieldError(reason::kBadField, "residual_token",
                      absl::StrCat("at most ", kMaxTokenBytes, " bytes"), absl::StrCat(range.size));
  }
  bytes.ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
    token.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  });
  return token;
}

Priority DecodePriority(v1::Priority priority) {
  if (priority == v1::PRIORITY_LOW) return Priority::kLow;
  return priority == v1::PRIORITY_HIGH ? Priority::kHigh : Priority::kNormal;
}

absl::Status CheckSize(Tensor tensor, int64_t expected, ByteRange got) {
  if (got.size == expected) return absl::OkStatus();
  return FieldError(reason::kSizeMismatch, TensorName(tensor),
                    expected == 0 ? "none beside residual_token" : absl::StrCat(expected, " bytes"),
                    absl::StrCat(got.size, " bytes"));
}

absl::Status BadShared(absl::string_view field, absl::string_view expected, absl::string_view got) {
  return FieldError(reason::kBadField, absl::StrCat("shared_memory.", field), expected, got);
}

absl::Status CheckPlace(const v1::SharedTensor& tensor, int regions) {
  if (tensor.name() == v1::TENSOR_NAME_UNSPECIFIED) {
    return BadShared("tensor.name", "a tensor's name", "none");
  }
  if (tensor.region() >= static_cast<uint32_t>(regions)) {
    return BadShared("tensor.region", absl::StrCat("below ", regions),
                     absl::StrCat(tensor.region()));
  }
  if (tensor.offset() % kSharedAlignment != 0) {
    return BadShared("tensor.offset", absl::StrCat("a multiple of ", kSharedAlignment),
                     absl::StrCat(tensor.offset()));
  }
  return absl::OkStatus();
}

// Null when the message names no shared memory. Sizes are checked with the payloads, bounds where
// the regions are known.
absl::StatusOr<std::unique_ptr<SharedRequest>> DecodeShared(const MessageBytes& bytes,
                                                            const FieldTable& table) {
  if (!table.Has(kSharedField)) return nullptr;
  v1::SharedMemory wire;
  RETURN_IF_ERROR(ParseRange(bytes, table.range[kSharedField], "shared_memory", wire));
  if (wire.region_size() < 1 || wire.region_size() > kTensors) {
    return BadShared("region", absl::StrCat("1..", kTensors, " tokens"),
                     absl::StrCat(wire.region_size()));
  }
  auto shared = std::make_unique<SharedRequest>();
  shared->regions.assign(wire.region().begin(), wire.region().end());
  shared->use = wire.use();
  uint32_t seen = 0;
  for (const v1::SharedTensor& tensor : wire.tensor()) {
    RETURN_IF_ERROR(CheckPlace(tensor, wire.region_size()));
    int number = static_cast<int>(tensor.name()) - 1;
    if ((seen >> number) & 1) {
      return BadShared("tensor", "each tensor at most once", TensorName(Tensor(number)));
    }
    seen |= uint32_t{1} << number;
    shared->places.push_back({Tensor(number), static_cast<int>(tensor.region()), tensor.offset(),
                              static_cast<int64_t>(std::min<uint64_t>(tensor.size(), INT64_MAX))});
  }
  return shared;
}

const SharedPlace* FindPlace(const SharedRequest* shared, Tensor tensor) {
  if (shared == nullptr) return nullptr;
  for (const SharedPlace& place : shared->places) {
    if (place.tensor == tensor) return &place;
  }
  return nullptr;
}

absl::Status RefuseUndeclared(const FieldTable& table, const Problem& problem) {
  if (!problem.bool_mask && table.range[RequestField(Tensor::kMaskBits)].size != 0) {
    return FieldError(reason::kSizeMismatch, "mask_bits", "none without problem.bool_mask",
                      absl::StrCat(table.range[RequestField(Tensor::kMaskBits)].size, " bytes"));
  }
  if (!problem.bias && table.range[RequestField(Tensor::kBias)].size != 0) {
    return FieldError(reason::kSizeMismatch, "bias", "none without problem.bias",
                      absl::StrCat(table.range[RequestField(Tensor::kBias)].size, " bytes"));
  }
  return absl::OkStatus();
}

bool DLseFollows(const FieldTable& table, Direction direction) {
  return direction == Direction::kBackward &&
         table.varint[v1::BackwardRequest::kDLseFollowsFieldNumber] != 0;
}

using Sources = absl::InlinedVector<TensorSource, 9>;

// What must come: with a token d_o alone.
TensorList ExpectedInputs(const Problem& problem, Direction direction, bool leased) {
  TensorList inputs = InputsOf(problem, direction);
  if (!leased) return inputs;
  for (TensorSize& input : inputs) {
    if (input.tensor != Tensor::kDO) input.bytes = 0;
  }
  return inputs;
}

// What a tensor's payload field or its place in shared memory says.
absl::StatusOr<ByteRange> RangeOf(const FieldTable& table, const SharedRequest* shared,
                                  Tensor tensor) {
  ByteRange range = table.range[RequestField(tensor)];
  const SharedPlace* place = FindPlace(shared, tensor);
  if (place == nullptr) return range;
  if (range.size == 0) return ByteRange{0, place->size};
  return FieldError(reason::kSizeMismatch, TensorName(tensor), "none beside shared memory",
                    absl::StrCat(range.size, " bytes"));
}

absl::StatusOr<Sources> FindPayloads(const FieldTable& table, const SharedRequest* shared,
                                     const Problem& problem, Direction direction, bool leased) {
  RETURN_IF_ERROR(RefuseUndeclared(table, problem));
  Sources sources;
  for (const TensorSize& input : ExpectedInputs(problem, direction, leased)) {
    ASSIGN_OR_RETURN(ByteRange range, RangeOf(table, shared, input.tensor));
    RETURN_IF_ERROR(CheckSize(input.tensor, input.bytes, range));
    if (!leased || input.tensor == Tensor::kDO) sources.push_back({input.tensor, range});
  }
  if (DLseFollows(table, direction)) {
    return FieldError(reason::kBadField, "d_lse_follows", "false in a unary call", "true");
  }
  if (direction == Direction::kForward) return sources;
  ASSIGN_OR_RETURN(ByteRange d_lse, RangeOf(table, shared, Tensor::kDLse));
  if (d_lse.size != 0) {
    RETURN_IF_ERROR(
        CheckSize(Tensor::kDLse, problem.LseElements() * int64_t{sizeof(float)}, d_lse));
    sources.push_back({Tensor::kDLse, d_lse});
  }
  return sources;
}

// Of a streamed call's header: what will follow.
absl::StatusOr<Sources> AnnouncedPayloads(const FieldTable& table, const Problem& problem,
                                          Direction direction, bool leased) {
  for (Tensor tensor : kInputs) {
    if (!table.Has(RequestField(tensor))) continue;
    return FieldError(reason::kBadField, TensorName(tensor),
                      "no payload in the header of a streamed call",
                      absl::StrCat(table.range[RequestField(tensor)].size, " bytes"));
  }
  Sources sources;
  for (const TensorSize& input : ExpectedInputs(problem, direction, leased)) {
    if (input.bytes > 0) sources.push_back({input.tensor, {0, input.bytes}});
  }
  if (DLseFollows(table, direction)) {
    sources.push_back({Tensor::kDLse, {0, problem.LseElements() * int64_t{sizeof(float)}}});
  }
  return sources;
}

// Every place is an input's or a wanted output's. Gives the bytes of both.
struct SharedBytes {
  int64_t inputs = 0, outputs = 0;
};
absl::StatusOr<SharedBytes> CheckShared(const AttentionCall& call, const SharedRequest* shared) {
  SharedBytes bytes;
  size_t found = 0;
  for (const TensorSource& input : call.inputs()) {
    if (FindPlace(shared, input.tensor) == nullptr) continue;
    bytes.inputs += input.range.size;
    ++found;
  }
  for (const TensorSize& output : OutputsOf(call.problem(), call.direction())) {
    const SharedPlace* place = FindPlace(shared, output.tensor);
    bool wanted = output.tensor != Tensor::kLse || call.want_lse();
    if (place == nullptr || !wanted) continue;
    RETURN_IF_ERROR(CheckSize(output.tensor, output.bytes, {0, place->size}));
    bytes.outputs += output.bytes;
    ++found;
  }
  if (call.keep_residual() && bytes.outputs > 0) {
    return BadShared("tensor", "no outputs together with options.keep_residual", "some");
  }
  if (shared == nullptr || found == shared->places.size()) return bytes;
  return BadShared("tensor", "inputs of the call and outputs that it wants", "others");
}

int64_t Total(const TensorList& list) {
  int64_t total = 0;
  for (const TensorSize& tensor : list) total += tensor.bytes;
  return total;
}

}  // namespace

absl::StatusOr<AttentionCall> Decoder::Decode(MessageBytes message, Direction direction) {
  ASSIGN_OR_RETURN(AttentionCall call,
                   DecodeIn(message, {0, message.size()}, direction, Form::kWhole));
  call.parts_->message = std::move(message);
  return call;
}

absl::StatusOr<AttentionCall> Decoder::DecodeHeader(const MessageBytes& message, ByteRange range,
                                                    Direction direction) {
  return DecodeIn(message, range, direction, Form::kHeader);
}

void Decoder::TakeOptions(v1::CallOptions& options, AttentionCall& call) {
  call.parts_->priority = DecodePriority(options.priority());
  call.parts_->request_id = std::move(*options.mutable_request_id());
  call.parts_->keep_residual = options.keep_residual();
  call.parts_->residual_ttl = absl::Milliseconds(options.residual_ttl_ms());
}

absl::StatusOr<AttentionCall> Decoder::DecodeIn(const MessageBytes& message, ByteRange range,
                                                Direction direction, Form form) {
  const auto& type = direction == Direction::kForward ? *v1::ForwardRequest::descriptor()
                                                      : *v1::BackwardRequest::descriptor();
  ASSIGN_OR_RETURN(FieldTable table, CheckWire(message, range, type,
                                               {.known = {kProblemField, LastProblem().bytes}}));
  if (!table.Has(kProblemField)) {
    return FieldError(reason::kBadField, "problem", "a problem", "none");
  }
  RETURN_IF_ERROR(RefuseUnimplemented(table));
  v1::CallOptions options;
  RETURN_IF_ERROR(DecodeOptions(message, table, direction, options));
  ASSIGN_OR_RETURN(std::string token, DecodeToken(message, table, direction));
  AttentionCall call;
  AttentionCall::Parts& parts = *call.parts_;
  const Problem& problem = parts.problem;
  RETURN_IF_ERROR(DecodeProblemIn(message, table, parts.problem));
  ASSIGN_OR_RETURN(std::unique_ptr<SharedRequest> shared, DecodeShared(message, table));
  if (form != Form::kWhole && shared != nullptr) {
    return FieldError(reason::kBadField, "shared_memory", "none in a streamed call", "some");
  }
  const bool leased = !token.empty();
  ASSIGN_OR_RETURN(Sources sources,
                   form == Form::kWhole
                       ? FindPayloads(table, shared.get(), problem, direction, leased)
                       : AnnouncedPayloads(table, problem, direction, leased));

  parts.direction = direction;
  parts.want_lse = direction == Direction::kForward &&
                   table.varint[v1::ForwardRequest::kWantLseFieldNumber] != 0;
  parts.residual_token = std::move(token);
  TakeOptions(options, call);
  for (const TensorSource& source : sources) parts.input_bytes += source.range.size;
  parts.output_bytes = Total(OutputsOf(problem, direction));
  // With shared memory the work of counting visible pairs is bounded once that is known to be
  // there.
  if (shared == nullptr) parts.flops = Flops(problem, direction);
  parts.inputs = std::move(sources);
  ASSIGN_OR_RETURN(SharedBytes in_shared, CheckShared(call, shared.get()));
  parts.shared_input_bytes = in_shared.inputs;
  parts.shared_output_bytes = in_shared.outputs;
  parts.shared_request = std::move(shared);
  return call;
}

}  // namespace attnd
