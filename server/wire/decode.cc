#include "server/wire/decode.h"

#include <google/protobuf/io/coded_stream.h>

#include <climits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/call/status_details.h"
#include "server/wire/decode_problem.h"
#include "server/wire/decode_shared.h"
#include "server/wire/decode_tensors.h"

namespace attnd {
namespace {

constexpr int kProblemField = v1::ForwardRequest::kProblemFieldNumber;
constexpr int kOptionsField = v1::ForwardRequest::kOptionsFieldNumber;
constexpr int kCaptureField = v1::ForwardRequest::kCaptureFieldNumber;
constexpr int64_t kMaxTokenBytes = 256;
constexpr int kSharedField = v1::ForwardRequest::kSharedMemoryFieldNumber;
static_assert(kSharedField == v1::BackwardRequest::kSharedMemoryFieldNumber);
static_assert(kProblemField == v1::BackwardRequest::kProblemFieldNumber);
static_assert(kOptionsField == v1::BackwardRequest::kOptionsFieldNumber);

// Into `message`, which is empty.
absl::Status ParseRange(const MessageBytes& bytes, ByteRange range, absl::string_view field,
                        google::protobuf::MessageLite& message) {
  MessageBytes::Stream stream(bytes, range);
  google::protobuf::io::CodedInputStream in(&stream);
  if (message.ParseFromCodedStream(&in) && in.ConsumedEntireMessage()) return absl::OkStatus();
  return FieldError(reason::kMalformedMessage, field, "a protobuf message with UTF-8 strings",
                    "bytes that are none");
}

// A problem and its bytes. Most callers repeat theirs; to check, parse and validate a small one
// again takes a tenth of a small call's instructions.
struct SeenProblem {
  std::string bytes;  // empty: none
  Problem problem;    // without the mask that it names
  std::string mask_id;
  std::weak_ptr<const CompiledMask> plan;  // of a mask whose rows need no check
};
constexpr int64_t kMaxSeenBytes = 256;
constexpr int64_t kMaxBytesAtOnce = 16 << 10;  // of a problem; a larger one takes long to parse

// The last problem that this thread decoded.
SeenProblem& LastProblem() {
  thread_local SeenProblem last;
  return last;
}

void Remember(const MessageBytes& message, ByteRange range, const DecodedProblem& decoded,
              const std::string& mask_id) {
  if (range.size > kMaxSeenBytes) return;
  SeenProblem& last = LastProblem();
  last.bytes.clear();
  message.ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
    last.bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  });
  last.problem = decoded.problem;
  last.mask_id = mask_id;
  last.plan.reset();
  if (decoded.plan == nullptr) return;
  if (decoded.problem.mask->spec().empty_row == EmptyRow::kZero) last.plan = decoded.plan;
  if (!mask_id.empty()) last.problem.mask = nullptr;
}

// Does what the table would have done with the mask, had it been parsed again.
absl::Status DecodeLastProblem(const CallersMasks& masks, DecodedProblem& decoded) {
  const SeenProblem& last = LastProblem();
  Problem& p = decoded.problem;
  p = last.problem;
  if (!last.mask_id.empty()) {
    ASSIGN_OR_RETURN(p.mask, masks.table.Find(last.mask_id, masks.caller, !masks.is_repeated));
  } else if (p.mask != nullptr) {
    p.mask = masks.table.Keep(std::move(p.mask), masks.caller);
  }
  decoded.plan = last.plan.lock();
  return decoded.plan != nullptr ? absl::OkStatus() : PlanMask(masks, decoded);
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

absl::Status CheckSize(const TensorSpec& tensor, int64_t expected, int64_t got) {
  if (got == expected) return absl::OkStatus();
  return FieldError(reason::kSizeMismatch, tensor.name,
                    expected == 0 ? "none beside residual_token" : absl::StrCat(expected, " bytes"),
                    absl::StrCat(got, " bytes"));
}

absl::StatusOr<SharedPlaces> DecodeShared(const MessageBytes& bytes, const FieldTable& table) {
  if (!table.Has(kSharedField)) return SharedPlaces();
  v1::SharedMemory wire;
  RETURN_IF_ERROR(ParseRange(bytes, table.range[kSharedField], "shared_memory", wire));
  return PlacesOf(wire);
}

// Sets where an input lies, from its payload field or its place in shared memory. Returns the bytes
// there.
absl::StatusOr<int64_t> FindInput(const FieldTable& table, const SharedPlaces& shared,
                                  TensorSpec& input) {
  const ByteRange range = table.range[input.field];
  const SharedPlace* place = shared.Find(input.id);
  if (place == nullptr) {
    input.offset = static_cast<uint64_t>(range.offset);
    return range.size;
  }
  if (range.size != 0) {
    return FieldError(reason::kSizeMismatch, input.name, "none beside shared memory",
                      absl::StrCat(range.size, " bytes"));
  }
  input.region = place->region;
  input.offset = place->offset;
  return place->bytes;
}

// Call options from the message, other than the Problem.
struct Outside {
  const MessageBytes& message;
  const FieldTable& table;
  const SharedPlaces& shared;
};

// The lists of the call's mask: they have come behind the header, lie in the message or in shared
// memory.
absl::StatusOr<std::string> ReadMaskDataOf(const Outside& call, const CallersMasks& masks,
                                           int64_t bytes) {
  if (StreamedMaskData* streamed = masks.streamed; streamed != nullptr) {
    if (static_cast<int64_t>(streamed->bytes.size()) == bytes) return std::move(streamed->bytes);
    streamed->wanted = bytes;
    return absl::CancelledError();
  }
  TensorSpec data = MaskDataInput(bytes);
  ASSIGN_OR_RETURN(const int64_t found, FindInput(call.table, call.shared, data));
  RETURN_IF_ERROR(CheckSize(data, bytes, found));
  if (data.region != kNoRegion && masks.read_shared == nullptr) {
    return BadShared("tensor", "no mask_data where none is read", "some");
  }
  if (data.region != kNoRegion) return masks.read_shared(*call.shared.request, data);
  std::string copy;
  copy.reserve(static_cast<size_t>(bytes));
  call.message.ForEachPiece(call.table.range[data.field], [&](absl::Span<const uint8_t> piece) {
    copy.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  });
  return copy;
}

absl::Status DecodeProblemIn(const Outside& call, const CallersMasks& masks,
                             DecodedProblem& decoded) {
  if (call.table.known) return DecodeLastProblem(masks, decoded);
  const ByteRange range = call.table.range[kProblemField];
  if (range.size > kMaxBytesAtOnce && masks.takes_long != nullptr) {
    *masks.takes_long = true;
    return absl::CancelledError();
  }
  v1::Problem wire;
  RETURN_IF_ERROR(ParseRange(call.message, range, "problem", wire));
  const auto read = [&](int64_t bytes) { return ReadMaskDataOf(call, masks, bytes); };
  ASSIGN_OR_RETURN(decoded, DecodeProblem(wire, masks, read));
  if (decoded.mask_data_bytes == 0) Remember(call.message, range, decoded, wire.mask().id());
  return absl::OkStatus();
}

// Refuses mask_data that no list lies in.
absl::Status CheckMaskDataIsUsed(const Outside& call, const DecodedProblem& decoded) {
  if (decoded.mask_data_bytes > 0) return absl::OkStatus();
  TensorSpec none = MaskDataInput(0);
  ASSIGN_OR_RETURN(const int64_t bytes, FindInput(call.table, call.shared, none));
  return RefuseMaskData(bytes);
}

// Empty when there is none. LeaseTable decides what it opens.
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

// Null when there is none.
absl::StatusOr<std::unique_ptr<const CaptureWish>> DecodeCapture(const MessageBytes& bytes,
                                                                 const FieldTable& table,
                                                                 Direction direction,
                                                                 const Problem& problem) {
  if (direction == Direction::kBackward || !table.Has(kCaptureField)) return nullptr;
  v1::Capture wire;
  RETURN_IF_ERROR(ParseRange(bytes, table.range[kCaptureField], "capture", wire));
  const CaptureRequest request = {.block = wire.block(), .keep_map = wire.keep()};
  if (const absl::Status status = CheckCapture(problem, request); !status.ok()) {
    return Classified(status);
  }
  return std::make_unique<const CaptureWish>(CaptureWish{
      .block = wire.block(), .keep = wire.keep(), .previous = std::move(*wire.mutable_previous())});
}

Priority DecodePriority(v1::Priority priority) {
  if (priority == v1::PRIORITY_LOW) return Priority::kLow;
  return priority == v1::PRIORITY_HIGH ? Priority::kHigh : Priority::kNormal;
}

absl::Status RefuseUndeclared(const FieldTable& table, const Problem& problem) {
  const int64_t mask_bytes = table.range[RequestField(Tensor::kMaskBits)].size;
  const int64_t bias_bytes = table.range[RequestField(Tensor::kBias)].size;
  if (!problem.bool_mask && mask_bytes != 0) {
    return FieldError(reason::kSizeMismatch, "mask_bits", "none without problem.bool_mask",
                      absl::StrCat(mask_bytes, " bytes"));
  }
  if (!problem.bias && bias_bytes != 0) {
    return FieldError(reason::kSizeMismatch, "bias", "none without problem.bias",
                      absl::StrCat(bias_bytes, " bytes"));
  }
  return absl::OkStatus();
}

bool DLseFollows(const FieldTable& table, Direction direction) {
  return direction == Direction::kBackward &&
         table.varint[v1::BackwardRequest::kDLseFollowsFieldNumber] != 0;
}

// Finds the inputs of a whole message: `inputs` are those that must come.
absl::Status FindInputs(const FieldTable& table, const SharedPlaces& shared, const Problem& problem,
                        Direction direction, TensorList& inputs) {
  RETURN_IF_ERROR(RefuseUndeclared(table, problem));
  for (TensorSpec& input : inputs) {
    ASSIGN_OR_RETURN(const int64_t bytes, FindInput(table, shared, input));
    RETURN_IF_ERROR(CheckSize(input, input.role == TensorUse::kKept ? 0 : input.bytes, bytes));
  }
  if (DLseFollows(table, direction)) {
    return FieldError(reason::kBadField, "d_lse_follows", "false in a unary call", "true");
  }
  if (direction == Direction::kForward) return absl::OkStatus();
  TensorSpec d_lse = LseGradient(problem);
  ASSIGN_OR_RETURN(const int64_t bytes, FindInput(table, shared, d_lse));
  if (bytes == 0) return absl::OkStatus();
  inputs.push_back(d_lse);
  return CheckSize(d_lse, d_lse.bytes, bytes);
}

absl::Status RefusePayload(const FieldTable& table, int id) {
  if (!table.Has(RequestField(id))) return absl::OkStatus();
  return FieldError(reason::kBadField, TensorName(id),
                    "no payload in the header of a streamed call",
                    absl::StrCat(table.range[RequestField(id)].size, " bytes"));
}

// Announces the inputs of a streamed call's header: `inputs` will follow.
absl::Status AnnounceInputs(const FieldTable& table, const Problem& problem, Direction direction,
                            TensorList& inputs) {
  for (int id = Tensor::kMaskBits; id <= Tensor::kDLse; ++id) {
    RETURN_IF_ERROR(RefusePayload(table, id));
  }
  if (DLseFollows(table, direction)) inputs.push_back(LseGradient(problem));
  return absl::OkStatus();
}

// Checks that every place in shared memory is an input's or a wanted output's, and sets where those
// outputs lie. `found`: places that are right already.
absl::Status FindOutputs(const SharedPlaces& shared, size_t found, TensorList& tensors) {
  for (TensorSpec& tensor : tensors) {
    const SharedPlace* place = shared.Find(tensor.id);
    if (place == nullptr || tensor.role == TensorUse::kKept || !tensor.wanted) continue;
    ++found;
    if (tensor.role == TensorUse::kInput) continue;
    RETURN_IF_ERROR(CheckSize(tensor, tensor.bytes, place->bytes));
    tensor.region = place->region;
    tensor.offset = place->offset;
  }
  if (found == shared.places.size()) return absl::OkStatus();
  return BadShared("tensor", "inputs of the call and outputs that it wants", "others");
}

}  // namespace

absl::StatusOr<AttentionCall> Decoder::Decode(MessageBytes message, Direction direction,
                                              const CallersMasks& masks, RequestRoom room) {
  ASSIGN_OR_RETURN(AttentionCall call,
                   DecodeIn(message, {0, message.size()}, direction, masks, room, Form::kWhole));
  call.parts_->message = std::move(message);
  return call;
}

absl::StatusOr<AttentionCall> Decoder::DecodeHeader(const MessageBytes& message, ByteRange range,
                                                    Direction direction, const CallersMasks& masks,
                                                    RequestRoom room) {
  return DecodeIn(message, range, direction, masks, room, Form::kHeader);
}

std::string Decoder::RequestIdOf(const MessageBytes& message, ByteRange range) {
  constexpr uint32_t kWireTypeBits = 3, kLengthDelimited = 2;
  constexpr uint32_t kMaxOptionsBytes = 4096;  // all that can be right is far less
  MessageBytes::Stream stream(message, range);
  google::protobuf::io::CodedInputStream in(&stream);
  while (const uint32_t tag = in.ReadTag()) {
    uint64_t value = 0;
    uint32_t size = 0;
    const uint32_t type = tag & ((1u << kWireTypeBits) - 1);
    if (type == 0 && in.ReadVarint64(&value)) continue;
    const bool has_size = type == kLengthDelimited && in.ReadVarint32(&size);
    if (!has_size || size > static_cast<uint32_t>(INT_MAX)) return "";
    if (tag >> kWireTypeBits != kOptionsField) {
      if (in.Skip(static_cast<int>(size))) continue;
      return "";
    }
    std::string bytes;
    v1::CallOptions options;
    const bool parsed = size <= kMaxOptionsBytes && in.ReadString(&bytes, static_cast<int>(size)) &&
                        options.ParseFromString(bytes);
    return parsed ? options.request_id().substr(0, kMaxStringBytes) : "";
  }
  return "";
}

void Decoder::TakeOptions(v1::CallOptions& options, AttentionCall& call) {
  call.parts_->priority = DecodePriority(options.priority());
  call.parts_->request_id = std::move(*options.mutable_request_id());
  call.parts_->keep_residual = options.keep_residual();
  call.parts_->residual_ttl = absl::Milliseconds(options.residual_ttl_ms());
}

absl::StatusOr<AttentionCall> Decoder::DecodeIn(const MessageBytes& message, ByteRange range,
                                                Direction direction, const CallersMasks& masks,
                                                RequestRoom room, Form form) {
  const auto& type = direction == Direction::kForward ? *v1::ForwardRequest::descriptor()
                                                      : *v1::BackwardRequest::descriptor();
  ASSIGN_OR_RETURN(FieldTable table, CheckWire(message, range, type,
                                               {.known = {kProblemField, LastProblem().bytes}}));
  RETURN_IF_ERROR(room(table.object_bytes));
  if (!table.Has(kProblemField)) {
    return FieldError(reason::kBadField, "problem", "a problem", "none");
  }
  v1::CallOptions options;
  RETURN_IF_ERROR(DecodeOptions(message, table, direction, options));
  ASSIGN_OR_RETURN(std::string token, DecodeToken(message, table, direction));
  AttentionCall call;
  AttentionCall::Parts& parts = *call.parts_;
  const Problem& problem = parts.problem;
  if (form == Form::kHeader) RETURN_IF_ERROR(RefusePayload(table, kMaskDataId));
  ASSIGN_OR_RETURN(SharedPlaces shared, DecodeShared(message, table));
  if (form != Form::kWhole && shared.request != nullptr) {
    return FieldError(reason::kBadField, "shared_memory", "none in a streamed call", "some");
  }
  const Outside outside = {message, table, shared};
  DecodedProblem decoded;
  RETURN_IF_ERROR(DecodeProblemIn(outside, masks, decoded));
  RETURN_IF_ERROR(CheckMaskDataIsUsed(outside, decoded));
  parts.problem = std::move(decoded.problem);
  if (problem.mask != nullptr) {
    parts.mask_plan_bytes = decoded.plan->bytes();
    parts.mask_bytes = problem.mask->bytes() + parts.mask_plan_bytes;
  }
  parts.mask_plan = std::move(decoded.plan);
  TensorList& tensors = parts.tensors;
  tensors = AttentionInputs(problem, direction, /*on_residual=*/!token.empty());
  RETURN_IF_ERROR(form == Form::kWhole ? FindInputs(table, shared, problem, direction, tensors)
                                       : AnnounceInputs(table, problem, direction, tensors));
  const bool want_lse = direction == Direction::kForward &&
                        table.varint[v1::ForwardRequest::kWantLseFieldNumber] != 0;
  AddAttentionOutputs(problem, direction, want_lse, tensors);
  RETURN_IF_ERROR(FindOutputs(shared, shared.Find(kMaskDataId) != nullptr ? 1 : 0, tensors));
  ASSIGN_OR_RETURN(parts.capture, DecodeCapture(message, table, direction, problem));
  parts.direction = direction;
  parts.residual_token = std::move(token);
  parts.shared_request = std::move(shared.request);
  TakeOptions(options, call);
  return call;
}

}  // namespace attnd
