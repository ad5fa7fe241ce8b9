#include "client/call/logical_call.h"

#include <google/protobuf/message_lite.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/time/clock.h"
#include "attention/cost.h"
#include "base/status_macros.h"
#include "client/shards/shard_plan.h"
#include "proto/attnd/v1/problem_codec.h"
#include "proto/attnd/v1/wire_writer.h"

namespace attnd {
namespace {

using Request = v1::BackwardRequest;  // its field numbers are forward's too

constexpr size_t kUsualHeaderBytes = 256;  // problem and options

// Each message's field numbers are a type of their own.
constexpr bool Same(int field, int other) { return field == other; }

static_assert(Same(v1::ForwardRequest::kProblemFieldNumber, Request::kProblemFieldNumber) &&
              Same(v1::ForwardRequest::kOptionsFieldNumber, Request::kOptionsFieldNumber) &&
              Same(v1::ForwardRequest::kQFieldNumber, Request::kQFieldNumber) &&
              Same(v1::ForwardRequest::kKFieldNumber, Request::kKFieldNumber) &&
              Same(v1::ForwardRequest::kVFieldNumber, Request::kVFieldNumber) &&
              Same(v1::ForwardRequest::kBiasFieldNumber, Request::kBiasFieldNumber) &&
              Same(v1::ForwardRequest::kMaskBitsFieldNumber, Request::kMaskBitsFieldNumber) &&
              Same(v1::ForwardRequest::kMaskDataFieldNumber, Request::kMaskDataFieldNumber));

void FillRuns(const StridedRuns& runs, void* tensor) {
  if (tensor == nullptr) return;
  for (int64_t run = 0; run < runs.run_count(); ++run) {
    std::memset(static_cast<std::byte*>(tensor) + runs.RunOffset(run), 0, runs.run_bytes);
  }
}

void FillMinusInfinity(const StridedRuns& runs, float* tensor) {
  if (tensor == nullptr) return;
  for (int64_t run = 0; run < runs.run_count(); ++run) {
    float* first = tensor + runs.RunOffset(run) / int64_t{sizeof(float)};
    std::fill(first, first + runs.run_bytes / int64_t{sizeof(float)},
              -std::numeric_limits<float>::infinity());
  }
}

}  // namespace

LogicalCall::LogicalCall(const Problem& problem, std::vector<ShardRange> shards,
                         v1::CallOptions header, const ForwardTensors& in,
                         const ForwardOutputs& out)
    : problem_(problem),
      shards_(std::move(shards)),
      direction_(Direction::kForward),
      options_(std::move(header)),
      in_{.q = in.q, .k = in.k, .v = in.v, .mask_bits = in.mask_bits, .bias = in.bias},
      forward_out_(out) {
  if (ShardMerger::IsNeeded(shards_, direction_)) {
    merger_.emplace(problem_, shards_, direction_,
                    ShardMerger::Outputs{.o = out.o, .lse = out.lse});
  }
  CountBytes();
}

LogicalCall::LogicalCall(const Problem& problem, std::vector<ShardRange> shards,
                         v1::CallOptions header, const BackwardTensors& in,
                         const BackwardOutputs& out)
    : problem_(problem),
      shards_(std::move(shards)),
      direction_(Direction::kBackward),
      options_(std::move(header)),
      in_(in),
      backward_out_(out) {
  if (NeedsBiasGradientSum(problem_, shards_)) {
    bias_sum_.emplace(problem_, shards_, backward_out_.d_bias);
  }
  if (ShardMerger::IsNeeded(shards_, direction_)) {
    merger_.emplace(problem_, shards_, direction_,
                    ShardMerger::Outputs{.d_k = out.d_k, .d_v = out.d_v, .d_sink = out.d_sink});
  }
  CountBytes();
}

const std::string& LogicalCall::MethodPath(Direction direction, bool streamed) {
  static const auto* paths =
      new std::string[4]{"/attnd.v1.Attention/Forward", "/attnd.v1.Attention/ForwardStream",
                         "/attnd.v1.Attention/Backward", "/attnd.v1.Attention/BackwardStream"};
  return paths[(direction == Direction::kBackward ? 2 : 0) + (streamed ? 1 : 0)];
}

void LogicalCall::Keep(absl::Duration ttl) {
  keep_ = true;
  keep_ttl_ms_ = static_cast<uint32_t>(absl::ToInt64Milliseconds(ttl));
  kept_.resize(shards_.size());
}

void LogicalCall::Capture(const CaptureOptions& options) { capture_ = options; }

void LogicalCall::TakeCapture(int address, const v1::CapturedMap& map) {
  CapturedAttention& captured = captured_.emplace();
  captured.pooled.resize(map.pooled().size() / sizeof(float));
  std::memcpy(captured.pooled.data(), map.pooled().data(), captured.pooled.size() * sizeof(float));
  captured.mean = map.mean();
  captured.variance = map.variance();
  captured.skewness = map.skewness();
  if (map.has_distance()) captured.distance = map.distance();
  captured.kept = {.token = map.token(), .address = address};
}

std::vector<HeldLease> LogicalCall::TakeKept() { return std::move(kept_); }

void LogicalCall::UseLeases(const ResidualState& residual) {
  residual_ = &residual;
  leases_ = residual.leases;
  CountBytes();
}

std::string LogicalCall::TokenOf(int64_t shard) const {
  if (residual_ == nullptr || leases_[shard] == 0) return "";
  std::optional<HeldLease> lease = residual_->book->Find(leases_[shard]);
  return lease.has_value() ? lease->token : "";
}

int LogicalCall::LeasedAddress(int64_t shard) const {
  if (residual_ == nullptr || leases_[shard] == 0) return -1;
  std::optional<HeldLease> lease = residual_->book->Find(leases_[shard]);
  return lease.has_value() ? lease->address : -1;
}

void LogicalCall::DropLease(int64_t shard, bool lost) {
  if (lost) residual_->book->Lost(leases_[shard]);
  leases_[shard] = 0;
}

void LogicalCall::NameMasks(KnownMasks& masks, bool lists_outside) {
  constexpr int64_t kSmallMask = 256;  // bytes; not worth a look-up
  if (problem_.mask == nullptr || problem_.mask->bytes() <= kSmallMask) return;
  known_masks_ = &masks;
  mask_forms_.assign(shards_.size(),
                     masks.Has(problem_.mask->id()) ? MaskForm::kId : MaskForm::kWhole);
  lists_outside_ = lists_outside;
}

const SplitMask& LogicalCall::Split() const {
  std::call_once(split_once_, [this] { split_ = EncodeSplitMask(problem_.mask->spec()); });
  return split_;
}

bool LogicalCall::SendWholeMask(int64_t shard) {
  if (known_masks_ == nullptr || mask_forms_[shard] == MaskForm::kWhole) return false;
  mask_forms_[shard] = MaskForm::kWhole;
  return true;
}

void LogicalCall::CountBytes() {
  total_bytes_ = 0;
  larger_message_.assign(shards_.size(), 0);
  for (int64_t shard = 0; shard < shard_count(); ++shard) {
    const ShardRange& range = shards_[shard];
    if (IsTrivial(problem_, range)) continue;
    const Problem problem = SubProblem(problem_, range);
    const MessageSizes message = MessageSizesOf(problem, direction_);
    larger_message_[shard] = std::max(message.request, message.reply);
    PayloadBytes bytes = BytesOf(problem, direction_);
    bool leased = LeasedAddress(shard) >= 0;
    int64_t sent = leased ? ShardRunsOf(problem_, range).o.total_bytes() : bytes.input;
    total_bytes_ += sent + bytes.output;
  }
}

bool LogicalCall::FillIfTrivial(int64_t shard) {
  const ShardRange& range = shards_[shard];
  if (!IsTrivial(problem_, range)) return false;
  ShardRuns runs = ShardRunsOf(problem_, range);
  const bool partial = IsPartOf(shard);
  if (direction_ == Direction::kForward && !partial) {
    FillRuns(runs.o, forward_out_.o);
    FillMinusInfinity(runs.lse, forward_out_.lse);
  }
  if (direction_ == Direction::kBackward) {
    FillRuns(runs.q, backward_out_.d_q);
    if (!partial) {
      FillRuns(runs.k, backward_out_.d_k);
      FillRuns(runs.v, backward_out_.d_v);
      FillRuns(runs.d_sink, backward_out_.d_sink);
    }
    if (SumsBiasGradient()) bias_sum_->Add(shard, {});
  }
  if (partial) merger_->Add(shard, {});
  return true;
}

std::string LogicalCall::Header(int64_t shard, const std::string& token, bool streamed) const {
  std::string header;
  header.reserve(kUsualHeaderBytes);
  WireWriter out(header);
  auto append = [&](int field, const google::protobuf::MessageLite& message) {
    out.Length(field, message.ByteSizeLong());
    message.AppendToString(&header);
  };
  const MaskForm mask = known_masks_ == nullptr ? MaskForm::kWhole : mask_forms_[shard];
  const Problem problem = SubProblem(problem_, shards_[shard]);
  append(Request::kProblemFieldNumber,
         BringsLists(shard) ? EncodeProblem(problem, Split().spec) : EncodeProblem(problem, mask));
  if (keep_) {
    v1::CallOptions options = options_;
    options.set_keep_residual(true);
    options.set_residual_ttl_ms(keep_ttl_ms_);
    append(Request::kOptionsFieldNumber, options);
  } else {
    append(Request::kOptionsFieldNumber, options_);
  }
  if (direction_ == Direction::kForward) {
    const bool want_lse = forward_out_.lse != nullptr || IsPartOf(shard);
    out.Number(v1::ForwardRequest::kWantLseFieldNumber, want_lse ? 1 : 0);
    if (capture_.has_value()) {
      v1::Capture capture;
      capture.set_block(static_cast<uint32_t>(capture_->block));
      capture.set_keep(capture_->keep);
      capture.set_previous(capture_->previous.token);
      append(v1::ForwardRequest::kCaptureFieldNumber, capture);
    }
  } else {
    const bool d_lse_follows = streamed && in_.d_lse != nullptr;
    out.Text(Request::kResidualTokenFieldNumber, token);
    out.Number(Request::kDLseFollowsFieldNumber, d_lse_follows ? 1 : 0);
  }
  return header;
}

// Adds the tensors that a server with the shard's residual has.
template <class Encoder>
void LogicalCall::AddKept(const ShardRuns& runs, Encoder& encoder) const {
  if (problem_.bool_mask) {
    encoder.AddPayload(Request::kMaskBitsFieldNumber, runs.mask_bits, in_.mask_bits);
  }
  if (problem_.bias) encoder.AddPayload(Request::kBiasFieldNumber, runs.bias, in_.bias);
  encoder.AddPayload(Request::kKFieldNumber, runs.k, in_.k);
  encoder.AddPayload(Request::kVFieldNumber, runs.v, in_.v);
  encoder.AddPayload(Request::kQFieldNumber, runs.q, in_.q);
  if (direction_ == Direction::kForward) return;
  encoder.AddPayload(Request::kLseFieldNumber, runs.lse, in_.lse);
  encoder.AddPayload(Request::kOFieldNumber, runs.o, in_.o);
}

template <class Encoder>
void LogicalCall::AddPayloads(int64_t shard, bool leased, Encoder& encoder) const {
  if (BringsLists(shard) && !Split().data.empty()) {
    const std::string& lists = Split().data;
    encoder.AddPayload(Request::kMaskDataFieldNumber,
                       StridedRuns::Make(0, {}, static_cast<int64_t>(lists.size())), lists.data());
  }
  ShardRuns runs = ShardRunsOf(problem_, shards_[shard]);
  if (!leased) AddKept(runs, encoder);
  if (direction_ == Direction::kForward) return;
  encoder.AddPayload(Request::kDOFieldNumber, runs.o, in_.d_o);
  if (in_.d_lse != nullptr) encoder.AddPayload(Request::kDLseFieldNumber, runs.lse, in_.d_lse);
}

EncodedRequest LogicalCall::Encode(int64_t shard, BorrowedSlices& borrowed) const {
  std::string token = TokenOf(shard);
  RequestEncoder encoder(Header(shard, token, false), borrowed);
  AddPayloads(shard, !token.empty(), encoder);
  grpc::ByteBuffer message = encoder.Finish();
  return {.message = std::move(message),
          .payload_bytes = encoder.payload_bytes(),
          .copied_bytes = encoder.copied_bytes(),
          .leased = !token.empty()};
}

StreamedRequest LogicalCall::EncodeStream(int64_t shard, BorrowedSlices& borrowed,
                                          int64_t chunk_bytes) const {
  std::string token = TokenOf(shard);
  ChunkSource source(Header(shard, token, true), borrowed, chunk_bytes);
  AddPayloads(shard, !token.empty(), source);
  return {.source = std::move(source), .leased = !token.empty()};
}

std::optional<SharedShard> LogicalCall::EncodeShared(int64_t shard, SharedMemory& memory,
                                                     const ReplyPlace& place) const {
  std::string token = TokenOf(shard);
  SharedShard shared{.header = Header(shard, token, false),
                     .tensors = SharedRequest(memory, direction_),
                     .leased = !token.empty()};
  AddPayloads(shard, shared.leased, shared.tensors);
  if (!keep_ || memory.takes_kept_outputs()) {
    for (const ReplyPayload& output : place.payloads) shared.tensors.AddOutput(output);
  }
  if (!shared.tensors.Place()) return std::nullopt;
  static_assert(Same(v1::ForwardRequest::kSharedMemoryFieldNumber,
                     v1::BackwardRequest::kSharedMemoryFieldNumber));
  v1::ForwardRequest field;  // messages end to end are merged
  *field.mutable_shared_memory() = shared.tensors.message();
  shared.header += field.SerializeAsString();
  return shared;
}

std::vector<ReplyPayload> LogicalCall::ReplyPayloads(const ShardRuns& runs, bool partial) {
  std::vector<ReplyPayload> payloads;
  if (direction_ == Direction::kForward) {
    payloads.push_back({v1::ForwardResponse::kOFieldNumber, "o", runs.o, forward_out_.o});
    if (forward_out_.lse != nullptr || partial) {
      payloads.push_back({v1::ForwardResponse::kLseFieldNumber, "lse", runs.lse, forward_out_.lse});
    }
    return payloads;
  }
  using Reply = v1::BackwardResponse;
  payloads.push_back({Reply::kDKFieldNumber, "d_k", runs.k, backward_out_.d_k});
  payloads.push_back({Reply::kDVFieldNumber, "d_v", runs.v, backward_out_.d_v});
  payloads.push_back({Reply::kDQFieldNumber, "d_q", runs.q, backward_out_.d_q});
  if (problem_.bias && problem_.bias->want_gradient) {
    payloads.push_back({Reply::kDBiasFieldNumber, "d_bias", runs.d_bias, backward_out_.d_bias});
  }
  if (problem_.denominator == DenominatorKind::kSink) {
    payloads.push_back({Reply::kDSinkFieldNumber, "d_sink", runs.d_sink, backward_out_.d_sink});
  }
  return payloads;
}

LogicalCall::ReplyPlace LogicalCall::PlaceOf(int64_t shard) {
  ReplyPlace place;
  place.payloads = ReplyPayloads(ShardRunsOf(problem_, shards_[shard]), IsPartOf(shard));
  for (ReplyPayload& payload : place.payloads) {
    int64_t size = payload.runs.total_bytes();
    place.bytes += size;
    if (payload.field_number != v1::BackwardResponse::kDBiasFieldNumber || !SumsBiasGradient()) {
      continue;
    }
    place.addends.resize(size / sizeof(float));
    payload.runs = StridedRuns::Make(0, {}, size);
    payload.tensor = place.addends.data();
  }
  if (IsPartOf(shard)) PlacePart(place);
  return place;
}

void LogicalCall::PlacePart(ReplyPlace& place) {
  auto lead = [](ReplyPayload& payload, auto& part) {
    int64_t size = payload.runs.total_bytes();
    part.resize(size / sizeof(part[0]));
    payload.runs = StridedRuns::Make(0, {}, size);
    payload.tensor = part.data();
  };
  for (ReplyPayload& payload : place.payloads) {
    absl::string_view name = payload.name;
    if (name == "o") lead(payload, place.part.o);
    if (name == "lse") lead(payload, place.part.lse);
    if (name == "d_k") lead(payload, place.part.d_k);
    if (name == "d_v") lead(payload, place.part.d_v);
    if (name == "d_sink") lead(payload, place.part.d_sink);
  }
}

void LogicalCall::Landed(int64_t shard, ReplyPlace place, const ReplyHeader& header, int address) {
  if (!kept_.empty()) KeepLease(shard, address, header.residual);
  if (capture_.has_value()) TakeCapture(address, header.captured);
  if (known_masks_ != nullptr) known_masks_->Add(problem_.mask->id());
  if (SumsBiasGradient()) bias_sum_->Add(shard, std::move(place.addends));
  if (IsPartOf(shard)) merger_->Add(shard, std::move(place.part));
}

absl::StatusOr<int64_t> LogicalCall::Land(int64_t shard, const grpc::ByteBuffer& reply, int address,
                                          ReplyHeader& header) {
  ReplyPlace place = PlaceOf(shard);
  RETURN_IF_ERROR(DecodeReply(reply, place.payloads, header));
  int64_t bytes = place.bytes;
  Landed(shard, std::move(place), header, address);
  return bytes;
}

// The two clocks may differ, so a life that its end would not tell is taken to be as wished.
void LogicalCall::KeepLease(int64_t shard, int address, const v1::Residual& residual) {
  absl::Duration wished = absl::Milliseconds(keep_ttl_ms_);
  absl::Duration left =
      absl::FromUnixMillis(static_cast<int64_t>(residual.expires_unix_ms())) - absl::Now();
  kept_[shard] = {.token = residual.token(),
                  .address = address,
                  .life = left > absl::ZeroDuration() ? std::min(left, wished) : wished,
                  .bytes = static_cast<int64_t>(residual.bytes_held())};
}

}  // namespace attnd
