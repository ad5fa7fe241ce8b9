// ChunkQueue: the tensors that a call sends, cut into chunks of kChunkBytes in their order. Each
// chunk is a message that holds the memory that it lies in. Several streams may take from one
// queue. Any thread.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class ChunkQueue {
 public:
  struct Tensor {
    int field;  // its number in the message
    const std::byte* data;
    int64_t bytes;
    std::shared_ptr<const void> memory;  // where `data` points to
  };
  // Tensors without bytes have no chunk.
  explicit ChunkQueue(std::vector<Tensor> tensors);

  bool empty() const;
  std::optional<grpc::ByteBuffer> Next();  // nullopt: none is left

 private:
  mutable absl::Mutex mutex_;
  std::vector<Tensor> tensors_ ABSL_GUARDED_BY(mutex_);  // the next one last
  int64_t offset_ ABSL_GUARDED_BY(mutex_) = 0;           // in the next one
};

}  // namespace attnd
