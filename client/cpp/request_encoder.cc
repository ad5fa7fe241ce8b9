#include "client/cpp/request_encoder.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <utility>

namespace attnd {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

void AppendVarint(uint64_t value, std::string& out) {
  uint8_t bytes[10];
  uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
  out.append(reinterpret_cast<const char*>(bytes), end - bytes);
}

}  // namespace

RequestEncoder::RequestEncoder(std::string header, SendLedger& ledger)
    : ledger_(ledger), small_(std::move(header)) {}

void RequestEncoder::AddPayload(int field_number, const StridedRuns& runs, const void* tensor) {
  auto* bytes = static_cast<const std::byte*>(tensor);
  int64_t total = runs.total_bytes();
  AppendVarint(WireFormatLite::MakeTag(field_number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED),
               small_);
  AppendVarint(static_cast<uint64_t>(total), small_);
  payload_bytes_ += total;
  if (runs.run_bytes >= kMinRunInPlace) {
    FlushSmall();
    for (int64_t run = 0; run < runs.run_count(); ++run) {
      slices_.push_back(ledger_.Lend(bytes + runs.RunOffset(run), runs.run_bytes));
    }
    return;
  }
  copied_bytes_ += total;
  if (total <= kMinRunInPlace) {
    size_t begin = small_.size();
    small_.resize(begin + total);
    Gather(runs, bytes, reinterpret_cast<std::byte*>(small_.data() + begin));
    return;
  }
  FlushSmall();
  grpc::Slice gathered(static_cast<size_t>(total));
  Gather(runs, bytes, reinterpret_cast<std::byte*>(const_cast<uint8_t*>(gathered.begin())));
  slices_.push_back(std::move(gathered));
}

void RequestEncoder::FlushSmall() {
  if (small_.empty()) return;
  slices_.emplace_back(small_.data(), small_.size());
  small_.clear();
}

grpc::ByteBuffer RequestEncoder::Finish() {
  FlushSmall();
  return grpc::ByteBuffer(slices_.data(), slices_.size());
}

}  // namespace attnd
