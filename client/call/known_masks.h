// KnownMasks: ids of masks that this client's servers have taken, so that later calls name them.
// One list for all servers: one that does not know a mask says so, and the shard is sent again with
// the mask itself. Any thread.
#pragma once

#include <cstddef>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "attention/masks/mask_description.h"

namespace attnd {

class KnownMasks {
 public:
  bool Has(const MaskId& id) const {
    absl::MutexLock lock(&mutex_);
    return ids_.count(id) != 0;
  }
  void Add(const MaskId& id) {
    absl::MutexLock lock(&mutex_);
    if (ids_.size() >= kMost) ids_.clear();  // costs each mask one more journey
    ids_.insert(id);
  }

 private:
  static constexpr size_t kMost = 16384;
  mutable absl::Mutex mutex_;
  std::set<MaskId> ids_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
