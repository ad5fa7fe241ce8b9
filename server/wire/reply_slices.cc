#include "server/wire/reply_slices.h"

#include <vector>

#include "absl/container/inlined_vector.h"

namespace attnd {

grpc::ByteBuffer WithProgress(const grpc::ByteBuffer& message,
                              const std::shared_ptr<TransferProgress>& progress) {
  const auto kept = std::make_shared<std::vector<grpc::Slice>>();
  message.Dump(kept.get());
  absl::InlinedVector<grpc::Slice, 4> slices;
  for (const grpc::Slice& slice : *kept) {
    AppendSlices(reinterpret_cast<const std::byte*>(slice.begin()),
                 static_cast<int64_t>(slice.size()), {kept, progress, 0}, slices);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace attnd
