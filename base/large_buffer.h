// LargeBuffer: zeroed memory for tensors that live longer than a call's messages do. From
// kMappedFrom bytes on it has pages of its own, which the system has back when it goes. glibc's
// heap would keep them in a daemon that lets it do so for gRPC's sake (net/process_tuning.h): a
// block of many megabytes leaves a hole that the next one, of another size or alignment, does not
// fit.
// The memory is written, not only promised: no later use finds that the machine has none left.
// Move-only; one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"

namespace attnd {

class LargeBuffer {
 public:
  static constexpr int64_t kMappedFrom = 1 << 20;
  static constexpr int64_t kAlignment = 256;  // of data()

  LargeBuffer() = default;
  // RESOURCE_EXHAUSTED: the machine has no such memory.
  static absl::StatusOr<LargeBuffer> Make(int64_t bytes);

  // Bytes that all buffers of this process have mapped. Any thread.
  static int64_t MappedBytes();

  std::byte* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
    size_t mapped;  // bytes; 0: from the heap
  };
  explicit LargeBuffer(std::unique_ptr<std::byte, Free> memory) : memory_(std::move(memory)) {}

  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace attnd
