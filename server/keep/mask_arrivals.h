// MaskArrivals: how much of masks that are not whole yet lies in memory: lists that a streamed call
// brings (mask_data) before its mask can be checked. A call has its room from its header until its
// mask is decoded. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/keep/caller_bytes.h"

namespace attnd {

class MaskArrivals {
 public:
  // Limits the bytes of all callers, and of one.
  MaskArrivals(int64_t max_bytes, int64_t caller_max_bytes)
      : max_bytes_(max_bytes), caller_max_bytes_(caller_max_bytes) {}

  // Given back when it goes. Outlived by its MaskArrivals.
  class Room {
   public:
    Room(MaskArrivals& of, absl::string_view caller, int64_t bytes)
        : of_(of), caller_(caller), bytes_(bytes) {}
    ~Room() { of_.Give(caller_, bytes_); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

   private:
    MaskArrivals& of_;
    const std::string caller_;
    const int64_t bytes_;
  };
  // RESOURCE_EXHAUSTED TENANT_QUOTA or UNAVAILABLE MEMORY_PRESSURE, with RetryInfo.
  absl::StatusOr<std::unique_ptr<Room>> Take(absl::string_view caller, int64_t bytes);
  int64_t bytes() const;

 private:
  void Give(const std::string& caller, int64_t bytes);

  const int64_t max_bytes_, caller_max_bytes_;
  mutable absl::Mutex mutex_;
  CallerBytes arriving_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
