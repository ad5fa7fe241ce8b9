// ModuleState: what of a module outlives the process: weights, moments and the ledger's last
// change, in files of a folder. That is memory of the host, such as a tmpfs, for DURABILITY_HOST,
// and on a disk for DURABILITY_DISK.
//
//   DIR/<SHA-256 of caller and name>/a.safetensors, b.safetensors   two slots, written in turn
//                                    commit    which slot counts, and its SHA-256
//                                    lock      of the process that has it
//
// A slot is whole before the commit record names it, and the record is replaced by rename. So a
// process that is killed at any moment leaves the last state that was committed; on a disk slot,
// record and folder are synced in this order, so that the host may fail at any moment too. What is
// damaged, half written or of another module is told and never loaded. Threads: one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "modules/module_engine.h"

namespace attnd {

// The ledger's part of a state.
struct SavedChange {
  uint64_t sequence = 0;
  std::string digest, reply;  // of the change that made it
};

struct StatePlace {
  std::string folder;
  bool is_disk = false;  // files are synced, and an expired module's stay
  // At most one save in this time, and in five times what one takes; above 0 `changes` alone
  // decides: one save each so many.
  absl::Duration every;
  int64_t changes = 0;
};

class ModuleState {
 public:
  // Told of each save, and of the bytes that it wrote.
  using Saved = std::function<void(const absl::Status& status, int64_t bytes)>;

  // Makes the folder and takes its lock. `module`: a digest of layout and optimizer. UNAVAILABLE
  // where files cannot be made, FAILED_PRECONDITION MODULE_EXISTS where another process has it.
  static absl::StatusOr<std::unique_ptr<ModuleState>> Open(const StatePlace& place,
                                                           const std::string& caller,
                                                           const std::string& name,
                                                           const std::string& module,
                                                           const Saved& saved);
  ~ModuleState();

  const StatePlace& place() const { return place_; }
  // Of both slots.
  static int64_t BytesOf(const ModuleDescription& module);

  // The committed state, put into `instance`. Nothing: there is none. DATA_LOSS: there is one that
  // must not be loaded, and why; the instance is as it was. Any other error: it is not.
  absl::StatusOr<std::optional<SavedChange>> Load(ModuleInstance& instance);
  absl::Status Save(const ModuleInstance& instance, const SavedChange& change);
  // The files go with the object.
  void Forget() { forget_ = true; }

 private:
  ModuleState(StatePlace place, std::string path, std::string module, Saved saved, int lock)
      : place_(std::move(place)),
        path_(std::move(path)),
        module_(std::move(module)),
        saved_(std::move(saved)),
        lock_(lock) {}
  absl::Status SaveInto(const std::string& slot, const ModuleInstance& instance,
                        const SavedChange& change) const;
  absl::Status Commit(const std::string& slot, const std::string& digest) const;
  absl::Status Sync(const std::string& path) const;  // a file or folder, where that is asked for

  const StatePlace place_;
  const std::string path_, module_;
  const Saved saved_;
  const int lock_;  // descriptor
  bool next_is_b_ = false;
  bool forget_ = false;
};

}  // namespace attnd
