#include "client/call/request_encoder.h"

#include <utility>

#include "proto/attnd/v1/wire_writer.h"

namespace attnd {

RequestEncoder::RequestEncoder(std::string header, BorrowedSlices& borrowed)
    : borrowed_(borrowed), small_(std::move(header)) {}

void RequestEncoder::AddPayload(int field_number, const StridedRuns& runs, const void* tensor) {
  auto* bytes = static_cast<const std::byte*>(tensor);
  int64_t total = runs.total_bytes();
  WireWriter(small_).Length(field_number, static_cast<uint64_t>(total));
  payload_bytes_ += total;
  if (runs.run_bytes >= kMinRunInPlace) {
    FlushSmall();
    for (int64_t run = 0; run < runs.run_count(); ++run) {
      slices_.push_back(borrowed_.Borrow(bytes + runs.RunOffset(run), runs.run_bytes));
    }
    return;
  }
  copied_bytes_ += total;
  if (total <= kMinRunInPlace) {
    if (small_.capacity() < small_.size() + total) {
      small_.reserve(small_.size() + 3 * kMinRunInPlace);  // k, v and q at once
    }
    for (int64_t run = 0; run < runs.run_count(); ++run) {
      small_.append(reinterpret_cast<const char*>(bytes + runs.RunOffset(run)), runs.run_bytes);
    }
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

// All of a small message: the string itself becomes the slice.
grpc::ByteBuffer RequestEncoder::Finish() {
  if (!small_.empty()) {
    auto* owner = new std::string(std::move(small_));
    auto destroy = [](void* text) { delete static_cast<std::string*>(text); };
    slices_.emplace_back(owner->data(), owner->size(), destroy, owner);
  }
  return grpc::ByteBuffer(slices_.data(), slices_.size());
}

}  // namespace attnd
