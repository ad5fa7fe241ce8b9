#include "client/call/chunk_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/call/request_encoder.h"
#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {

ChunkSource::ChunkSource(std::string header, BorrowedSlices& borrowed, int64_t chunk_bytes)
    : header_(std::move(header)),
      borrowed_(borrowed),
      chunk_bytes_(std::min(chunk_bytes, kMaxChunkBytes)) {}

void ChunkSource::AddPayload(int field_number, const StridedRuns& runs, const void* tensor) {
  payloads_.push_back({field_number, runs, static_cast<const std::byte*>(tensor)});
  payload_bytes_ += runs.total_bytes();
}

grpc::ByteBuffer ChunkSource::Next() {
  std::vector<grpc::Slice> slices;
  if (header_left_) {
    header_left_ = false;
    slices.emplace_back(FrameHeader(header_));
    return grpc::ByteBuffer(slices.data(), slices.size());
  }
  const Payload& payload = payloads_[current_];
  int64_t size = std::min(chunk_bytes_, payload.runs.total_bytes() - offset_);
  slices.emplace_back(ChunkPrefix(payload.field_number, offset_, size));
  AppendData(payload, size, slices);
  offset_ += size;
  if (offset_ == payload.runs.total_bytes()) {
    ++current_;
    offset_ = 0;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

void ChunkSource::AppendData(const Payload& payload, int64_t bytes,
                             std::vector<grpc::Slice>& slices) {
  const StridedRuns& runs = payload.runs;
  bool in_place = runs.run_bytes >= kMinRunInPlace;
  grpc::Slice gathered = in_place ? grpc::Slice() : grpc::Slice(static_cast<size_t>(bytes));
  auto* to = const_cast<uint8_t*>(gathered.begin());
  for (int64_t at = offset_, end = offset_ + bytes; at < end;) {
    int64_t within = at % runs.run_bytes;
    int64_t step = std::min(runs.run_bytes - within, end - at);
    const std::byte* from = payload.tensor + runs.RunOffset(at / runs.run_bytes) + within;
    if (in_place) {
      slices.push_back(borrowed_.Borrow(from, step));
    } else {
      std::memcpy(to, from, static_cast<size_t>(step));
      to += step;
    }
    at += step;
  }
  if (in_place) return;
  copied_bytes_ += bytes;
  slices.push_back(std::move(gathered));
}

}  // namespace attnd
