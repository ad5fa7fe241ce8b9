#include "proto/attnd/v1/chunk_queue.h"

#include <algorithm>
#include <utility>

#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

void DropMemory(void* memory) { delete static_cast<std::shared_ptr<const void>*>(memory); }

}  // namespace

ChunkQueue::ChunkQueue(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
  std::erase_if(tensors_, [](const Tensor& tensor) { return tensor.bytes == 0; });
  std::reverse(tensors_.begin(), tensors_.end());
}

bool ChunkQueue::empty() const {
  absl::MutexLock lock(&mutex_);
  return tensors_.empty();
}

std::optional<grpc::ByteBuffer> ChunkQueue::Next() {
  absl::MutexLock lock(&mutex_);
  if (tensors_.empty()) return std::nullopt;
  const Tensor& tensor = tensors_.back();
  const int64_t bytes = std::min(kChunkBytes, tensor.bytes - offset_);
  const grpc::Slice parts[] = {
      grpc::Slice(ChunkPrefix(tensor.field, offset_, bytes)),
      grpc::Slice(const_cast<std::byte*>(tensor.data) + offset_, static_cast<size_t>(bytes),
                  &DropMemory, new std::shared_ptr<const void>(tensor.memory))};
  offset_ += bytes;
  if (offset_ == tensor.bytes) {
    tensors_.pop_back();
    offset_ = 0;
  }
  return grpc::ByteBuffer(parts, 2);
}

}  // namespace attnd
