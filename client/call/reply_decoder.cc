#include "client/call/reply_decoder.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/wire_format.h"

namespace attnd {
namespace {

using google::protobuf::io::CodedInputStream;

constexpr int kReceiptField = v1::ForwardResponse::kReceiptFieldNumber;
static_assert(kReceiptField == v1::BackwardResponse::kReceiptFieldNumber);
constexpr int kResidualField = v1::ForwardResponse::kResidualFieldNumber;  // forward only
constexpr int kCapturedField = v1::ForwardResponse::kCapturedFieldNumber;  // likewise

absl::Status Malformed(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("reply: ", what));
}

class ReplyParser {
 public:
  ReplyParser(CodedInputStream& in, absl::Span<const ReplyPayload> payloads, ReplyHeader& header)
      : in_(in), payloads_(payloads), header_(header) {}

  absl::Status Parse() {
    while (uint32_t tag = in_.ReadTag()) {
      if (tag == Tag(kReceiptField)) {
        RETURN_IF_ERROR(
            ParseMessage("receipt", [this] { return ReadReceipt(in_, header_.receipt); }));
      } else if (tag == Tag(kResidualField)) {
        RETURN_IF_ERROR(ParseMessage(
            "residual", [this] { return header_.residual.ParseFromCodedStream(&in_); }));
      } else if (tag == Tag(kCapturedField)) {
        RETURN_IF_ERROR(ParseMessage(
            "captured", [this] { return header_.captured.ParseFromCodedStream(&in_); }));
      } else if (int n = PayloadOf(tag); n >= 0) {
        RETURN_IF_ERROR(LandPayload(n));
      } else if (!SkipValue(in_, tag)) {
        return Malformed("a field that cannot be skipped");
      }
    }
    if (!in_.ConsumedEntireMessage()) return Malformed("ends inside a field");
    return CheckComplete();
  }

 private:
  static uint32_t Tag(int field) { return WireTag(field, WireType::kLengthDelimited); }

  int PayloadOf(uint32_t tag) const {
    for (size_t n = 0; n < payloads_.size(); ++n) {
      if (tag == Tag(payloads_[n].field_number)) return static_cast<int>(n);
    }
    return -1;
  }

  template <class Parser>
  absl::Status ParseMessage(absl::string_view name, const Parser& parse) {
    uint32_t size;
    if (in_.ReadVarint32(&size) && size <= INT32_MAX) {
      auto outer = in_.PushLimit(static_cast<int>(size));
      bool parsed = parse() && in_.BytesUntilLimit() == 0;
      in_.PopLimit(outer);
      if (parsed) return absl::OkStatus();
    }
    return Malformed(absl::StrCat(name, ": cannot be parsed"));
  }

  absl::Status LandPayload(int n) {
    const ReplyPayload& payload = payloads_[n];
    if (seen_ & (1u << n)) return Malformed(absl::StrCat(payload.name, ": stands twice"));
    seen_ |= 1u << n;
    uint64_t size;
    if (!in_.ReadVarint64(&size)) return Malformed(absl::StrCat(payload.name, ": no length"));
    if (size != static_cast<uint64_t>(payload.runs.total_bytes())) {
      return Malformed(absl::StrCat(payload.name, ": expected ", payload.runs.total_bytes(),
                                    " bytes, got ", size));
    }
    RunCursor cursor(payload.runs, static_cast<std::byte*>(payload.tensor));
    if (ScatterFrom(in_, static_cast<int64_t>(size), cursor)) return absl::OkStatus();
    return Malformed(absl::StrCat(payload.name, ": is cut off"));
  }

  absl::Status CheckComplete() const {
    for (size_t n = 0; n < payloads_.size(); ++n) {
      if (!(seen_ & (1u << n))) return Malformed(absl::StrCat(payloads_[n].name, ": is missing"));
    }
    return absl::OkStatus();
  }

  CodedInputStream& in_;
  absl::Span<const ReplyPayload> payloads_;
  uint32_t seen_ = 0;  // a bit for each
  ReplyHeader& header_;
};

}  // namespace

bool ScatterFrom(CodedInputStream& in, int64_t bytes, RunCursor& cursor) {
  for (int64_t left = bytes; left > 0;) {
    const void* piece;
    int piece_bytes;
    if (!in.GetDirectBufferPointer(&piece, &piece_bytes)) return false;
    int64_t step = std::min<int64_t>(left, piece_bytes);
    cursor.Scatter(static_cast<const std::byte*>(piece), step);
    in.Skip(static_cast<int>(step));
    left -= step;
  }
  return true;
}

absl::Status DecodeReply(const grpc::ByteBuffer& message, absl::Span<const ReplyPayload> payloads,
                         ReplyHeader& header) {
  // It wants a buffer that is not const, and only looks.
  grpc::ProtoBufferReader reader(const_cast<grpc::ByteBuffer*>(&message));
  if (!reader.status().ok()) return Malformed(reader.status().error_message());
  CodedInputStream in(&reader);
  return ReplyParser(in, payloads, header).Parse();
}

}  // namespace attnd
