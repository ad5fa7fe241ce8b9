// Slices of a reply that tell how far its peer has read: gRPC lets go of a slice once it is written
// to the socket, and a TransferProgress hears of it. Any thread.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "server/call/transfer_progress.h"

namespace attnd {

// Pieces of this size show progress.
inline constexpr int64_t kReplyPieceBytes = 256 << 10;

// Owns the memory of one slice; its end tells the call's progress.
struct ReplySliceOwner {
  std::shared_ptr<const void> memory;
  std::shared_ptr<TransferProgress> progress;
  int64_t bytes;

  static void End(void* pointer) {
    std::unique_ptr<ReplySliceOwner> owner(static_cast<ReplySliceOwner*>(pointer));
    owner->progress->Moved(owner->bytes);
  }
};

// Slices over `data`, at the end of `slices`.
template <typename Slices>
void AppendSlices(const std::byte* data, int64_t size, const ReplySliceOwner& owner,
                  Slices& slices) {
  for (int64_t offset = 0; offset < size; offset += kReplyPieceBytes) {
    const int64_t bytes = std::min(kReplyPieceBytes, size - offset);
    slices.emplace_back(const_cast<std::byte*>(data + offset), static_cast<size_t>(bytes),
                        ReplySliceOwner::End,
                        new ReplySliceOwner{owner.memory, owner.progress, bytes});
  }
}

// The same message in such slices.
grpc::ByteBuffer WithProgress(const grpc::ByteBuffer& message,
                              const std::shared_ptr<TransferProgress>& progress);

}  // namespace attnd
