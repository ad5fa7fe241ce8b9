// StateRoot: the folder of --module_state_dir: what all states in it take, of which there is a
// quota, and their end. A state whose module nobody registers goes after some time.
//
//   DIR/<SHA-256 of caller and name>/   a StateFolder for each module
//
// The folder is this process's user's, and no other user may write to it. Only one right below the
// root of a mounted volume is made if it is missing. A caller's states may take half of the quota.
// Sizes are those of the files at the start, and of registrations since.
// Errors: UNAVAILABLE STATE_UNAVAILABLE, RESOURCE_EXHAUSTED MODULE_QUOTA. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "net/file_descriptor.h"
#include "server/modules/state_folder.h"

namespace attnd {

struct StateLimits {
  int64_t bytes = INT64_MAX;                          // of all states
  absl::Duration most_unused = absl::Hours(24 * 30);  // of one whose module is not registered
};

class StateRoot {
 public:
  // INVALID_ARGUMENT naming the path, when it is no folder, not private, or nothing can be made in
  // it.
  static absl::StatusOr<std::unique_ptr<StateRoot>> Open(
      const std::string& path, const StateLimits& limits,
      std::unique_ptr<StateDisk> disk = std::make_unique<StateDisk>());

  // A tmpfs, which does not outlive the host.
  bool is_host_memory() const { return is_host_memory_; }
  // The folder of a caller's module, for a state of so many bytes. FAILED_PRECONDITION: another
  // process has it.
  absl::StatusOr<StateFolder> OpenFolder(const std::string& caller, const std::string& name,
                                         int64_t bytes);
  // When its user goes: with `removed` its files have gone.
  void Close(const StateFolder& folder, bool removed);
  // Makes the folder's own entries outlive the host.
  absl::Status Sync() const;
  // Removes states that were not in use for too long.
  void Sweep(absl::Time now);

  int64_t bytes() const;
  int64_t swept() const;  // states, since the start

 private:
  StateRoot(std::unique_ptr<StateDisk> disk, FileDescriptor folder, const StateLimits& limits)
      : disk_(std::move(disk)),
        folder_(std::move(folder)),
        limits_(limits),
        is_host_memory_(disk_->IsHostMemory(folder_.get())) {}
  void Scan();
  struct Entry {
    std::string caller;  // its digest; empty: not known
    int64_t bytes = 0;
  };
  // The entry that was there before.
  absl::StatusOr<Entry> Reserve(const std::string& name, const std::string& caller, int64_t bytes);

  const std::unique_ptr<StateDisk> disk_;
  const FileDescriptor folder_;
  const StateLimits limits_;
  const bool is_host_memory_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);  // by the folder's name
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t swept_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
