// KeptBytes: a copy of one tensor of a call, held until nothing may have to send it again: in
// memory that is shared with the daemon, where there is some, so that it need not be copied there
// too. A value; copies share the bytes, which do not change. Any thread.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/types/span.h"
#include "client/call/shared_memory.h"

namespace attnd {

class KeptBytes {
 public:
  KeptBytes() = default;
  // `shared`: null: none. Small tensors do not lie there.
  static KeptBytes Copy(absl::Span<const std::byte> bytes, SharedMemory* shared);
  static KeptBytes Zeros(size_t size);

  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const std::shared_ptr<const std::byte>& memory() const { return data_; }

 private:
  KeptBytes(std::shared_ptr<const std::byte> data, size_t size)
      : data_(std::move(data)), size_(size) {}

  std::shared_ptr<const std::byte> data_;
  size_t size_ = 0;
};

}  // namespace attnd
