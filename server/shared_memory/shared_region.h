// SharedRegion: memory of a caller on this host, mapped from the memfd that it sent. Its size is
// sealed, its pages are allocated (and charged to the caller) and cannot be freed, so no access to
// it can fail. The caller can change the bytes at any time, even while a kernel reads them.
//
// Errors of Map: FAILED_PRECONDITION "memfd: expected ..., got ...". Any thread.
// Source: memfd_create(2), fcntl(2) File Sealing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace attnd {

class SharedRegion {
 public:
  // `fd` remains the caller's to close. `size`: what the sender says, above 0.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Map(int fd, int64_t size);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  SharedRegion(std::byte* data, int64_t size) : data_(data), size_(size) {}
  std::byte* const data_;
  const int64_t size_;
};

}  // namespace attnd
