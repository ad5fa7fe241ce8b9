// SharedMemory: the memory that this client shares with a daemon on the same host, so that tensors
// need not travel (proto/attnd/v1/shared_memory.proto). It grows by regions as blocks are asked
// for. A daemon that cannot be shared with, in another container or with the path turned off, is no
// error: then there are no blocks, and tensors travel.
//
// A block lives in a region until its last owner goes. When the daemon is gone, its regions serve
// no call any more, but blocks in them stay ordinary memory. After a fork both processes have the
// same blocks: one of them must not use them. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "net/file_descriptor.h"

namespace attnd {

class ClientRegion;

// Where bytes lie, in the words of a call's header.
struct SharedPlaceOf {
  std::string region;  // token
  uint64_t offset = 0;
};

class SharedMemory {
 public:
  static constexpr int64_t kAlignment = 64;

  // `unix_path`: the daemon's unix socket. `authorization`: as in calls, may be empty. Nothing is
  // shared before the first block is asked for. `max_bytes`: of all regions.
  SharedMemory(std::string unix_path, std::string authorization, int64_t max_bytes)
      : path_(std::move(unix_path)),
        authorization_(std::move(authorization)),
        max_bytes_(max_bytes) {}
  ~SharedMemory();

  // 64-byte aligned; null when there is nothing to be had now. The memory lives as long as its last
  // owner, also beyond this object.
  std::shared_ptr<std::byte> Allocate(int64_t bytes);

  // Nothing when these bytes do not lie, aligned, in memory that the daemon shares now.
  std::optional<SharedPlaceOf> Find(const void* data, int64_t bytes) const;

  // Whether outputs of forwards that are kept may lie there too.
  bool takes_kept_outputs() const;
  // Whether calls of modules may have tensors there.
  bool takes_modules() const;

  // A number for SharedMemory.use of a call.
  uint64_t NewUse();
  // After a call that did not end with OK: waits until the daemon has let go of the call's memory.
  // When it does not for long, or is gone, its regions are given up.
  void EndUse(uint64_t use);
  // The daemon knows the regions no more.
  void Forget();

 private:
  using Regions = std::vector<std::shared_ptr<ClientRegion>>;
  std::shared_ptr<std::byte> TakeFrom(const std::shared_ptr<ClientRegion>& region, int64_t bytes);
  bool Connect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(link_mutex_);
  std::shared_ptr<ClientRegion> AddRegion(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(link_mutex_);
  void Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(link_mutex_);
  Regions Current() const;

  const std::string path_;
  const std::string authorization_;
  const int64_t max_bytes_;
  absl::Mutex link_mutex_;  // taken before mutex_
  FileDescriptor link_ ABSL_GUARDED_BY(link_mutex_);
  absl::Time try_again_ ABSL_GUARDED_BY(link_mutex_) = absl::InfinitePast();
  mutable absl::Mutex mutex_;
  Regions regions_ ABSL_GUARDED_BY(mutex_);  // shared with their blocks
  // The daemon of regions_ said so.
  bool takes_kept_outputs_ ABSL_GUARDED_BY(mutex_) = false;
  bool takes_modules_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_use_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
