#include "server/decode.h"

#include <google/protobuf/io/coded_stream.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/decode_problem.h"
#include "server/status_details.h"

namespace attnd {
namespace {

constexpr int kProblemField = v1::ForwardRequest::kProblemFieldNumber;
constexpr int kOptionsField = v1::ForwardRequest::kOptionsFieldNumber;
constexpr int64_t kMaxTokenBytes = 256;
static_assert(kProblemField == v1::BackwardRequest::kProblemFieldNumber);
static_assert(kOptionsField == v1::BackwardRequest::kOptionsFieldNumber);

int FieldNumber(Tensor tensor) {
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

template <class Message>
absl::StatusOr<Message> ParseRange(const MessageBytes& bytes, ByteRange range,
                                   absl::string_view field) {
  MessageBytes::Stream stream(bytes, range);
  google::protobuf::io::CodedInputStream in(&stream);
  Message message;
  if (message.ParseFromCodedStream(&in) && in.ConsumedEntireMessage()) return message;
  return FieldError(reason::kMalformedMessage, field, "a protobuf message with UTF-8 strings",
                    "bytes that are none");
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

absl::StatusOr<v1::CallOptions> DecodeOptions(const MessageBytes& bytes, const FieldTable& table,
                                              Direction direction) {
  v1::CallOptions options;
  if (!table.Has(kOptionsField)) return options;
  ASSIGN_OR_RETURN(options,
                   ParseRange<v1::CallOptions>(bytes, table.range[kOptionsField], "options"));
  if (options.keep_residual() && direction == Direction::kBackward) {
    return FieldError(reason::kBadField, "options.keep_residual", "false in Backward", "true");
  }
  return options;
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
  return FieldError(reason::kSizeMismatch, TensorName(tensor), absl::StrCat(expected, " bytes"),
                    absl::StrCat(got.size, " bytes"));
}

absl::Status RefuseUndeclared(const FieldTable& table, const Problem& problem) {
  if (!problem.bool_mask && table.range[FieldNumber(Tensor::kMaskBits)].size != 0) {
    return FieldError(reason::kSizeMismatch, "mask_bits", "none without problem.bool_mask",
                      absl::StrCat(table.range[FieldNumber(Tensor::kMaskBits)].size, " bytes"));
  }
  if (!problem.bias && table.range[FieldNumber(Tensor::kBias)].size != 0) {
    return FieldError(reason::kSizeMismatch, "bias", "none without problem.bias",
                      absl::StrCat(table.range[FieldNumber(Tensor::kBias)].size, " bytes"));
  }
  return absl::OkStatus();
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

absl::StatusOr<Sources> FindPayloads(const FieldTable& table, const Problem& problem,
                                     Direction direction, bool leased) {
  RETURN_IF_ERROR(RefuseUndeclared(table, problem));
  Sources sources;
  for (const TensorSize& input : ExpectedInputs(problem, direction, leased)) {
    ByteRange range = table.range[FieldNumber(input.tensor)];
    RETURN_IF_ERROR(CheckSize(input.tensor, input.bytes, range));
    if (!leased || input.tensor == Tensor::kDO) sources.push_back({input.tensor, range});
  }
  ByteRange d_lse = table.range[FieldNumber(Tensor::kDLse)];
  if (direction == Direction::kBackward && d_lse.size != 0) {
    RETURN_IF_ERROR(
        CheckSize(Tensor::kDLse, problem.LseElements() * int64_t{sizeof(float)}, d_lse));
    sources.push_back({Tensor::kDLse, d_lse});
  }
  return sources;
}

int64_t Total(const TensorList& list) {
  int64_t total = 0;
  for (const TensorSize& tensor : list) total += tensor.bytes;
  return total;
}

}  // namespace

absl::StatusOr<AttentionCall> Decoder::Decode(MessageBytes message, Direction direction) {
  const auto& type = direction == Direction::kForward ? *v1::ForwardRequest::descriptor()
                                                      : *v1::BackwardRequest::descriptor();
  ASSIGN_OR_RETURN(FieldTable table, CheckWire(message, type));
  if (!table.Has(kProblemField)) {
    return FieldError(reason::kBadField, "problem", "a problem", "none");
  }
  RETURN_IF_ERROR(RefuseUnimplemented(table));
  ASSIGN_OR_RETURN(v1::CallOptions options, DecodeOptions(message, table, direction));
  ASSIGN_OR_RETURN(std::string token, DecodeToken(message, table, direction));
  ASSIGN_OR_RETURN(v1::Problem wire,
                   ParseRange<v1::Problem>(message, table.range[kProblemField], "problem"));
  ASSIGN_OR_RETURN(Problem problem, DecodeProblem(wire));
  ASSIGN_OR_RETURN(Sources sources, FindPayloads(table, problem, direction, !token.empty()));

  AttentionCall call;
  call.direction_ = direction;
  call.want_lse_ = direction == Direction::kForward &&
                   table.varint[v1::ForwardRequest::kWantLseFieldNumber] != 0;
  call.priority_ = DecodePriority(options.priority());
  call.request_id_ = options.request_id();
  call.keep_residual_ = options.keep_residual();
  call.residual_ttl_ = absl::Milliseconds(options.residual_ttl_ms());
  call.residual_token_ = std::move(token);
  for (const TensorSource& source : sources) call.input_bytes_ += source.range.size;
  call.output_bytes_ = Total(OutputsOf(problem, direction));
  // Only now: the work of counting visible pairs is bounded by the payload that has arrived.
  call.flops_ = Flops(problem, direction);
  call.inputs_ = std::move(sources);
  call.problem_ = std::make_unique<const Problem>(std::move(problem));
  call.message_ = std::move(message);
  return call;
}

}  // namespace attnd
