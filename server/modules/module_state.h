// ModuleState: what of a module outlives the process: weights, moments and the ledger's last
// change, in files of a folder. That is memory of the host, such as a tmpfs, for DURABILITY_HOST,
// and on a disk for DURABILITY_DISK.
//
//   a.safetensors, b.safetensors   two slots, written in turn
//   commit    which slot counts, its SHA-256, and that of the other slot, which is the state before
//   caller    whose it is, as a digest
//   lock      of the process that has it
//
// A slot is whole before the commit record names it, and the record is replaced by rename. So a
// process that is killed at any moment leaves the last state that was committed; on a disk slot,
// record and folder are synced in this order, so that the host may fail at any moment too. What is
// damaged, half written or of another module is told and never loaded; then the state before is, if
// it is whole. Threads: one at a time.
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
#include "server/modules/state_root.h"

namespace attnd {

// The ledger's part of a state.
struct SavedChange {
  uint64_t sequence = 0;
  std::string digest, reply;  // of the change that made it
  uint64_t owner_epoch = 0, history_epoch = 0;
};

struct StatePlace {
  StateRoot* root = nullptr;  // outlives the states
  bool is_disk = false;       // files are synced, and an expired module's stay
  // At most one save in this time, and in five times what one takes; above 0 `changes` alone
  // decides: one save each so many.
  absl::Duration every;
  int64_t changes = 0;
};

class ModuleState {
 public:
  // Told of each save, and of the bytes that it wrote.
  using Saved = std::function<void(const absl::Status& status, int64_t bytes)>;

  struct Owner {
    std::string caller, name;
    std::string module;  // a digest of layout and optimizer
  };
  // Makes the folder and takes its lock, for files of so many bytes: FileBytesOf. StateRoot's
  // errors, and FAILED_PRECONDITION MODULE_EXISTS where another process has it.
  static absl::StatusOr<std::unique_ptr<ModuleState>> Open(const StatePlace& place,
                                                           const Owner& owner, int64_t bytes,
                                                           const Saved& saved);
  ~ModuleState();

  const StatePlace& place() const { return place_; }
  // Counts the bytes of the tensors of both slots, and at most those of all files.
  static int64_t BytesOf(const ModuleDescription& module);
  static int64_t FileBytesOf(const ModuleDescription& module);

  struct Loaded {
    std::optional<SavedChange> change;  // nothing: there is no state, or none that may be loaded
    absl::Status damage;                // why the last one, or any, was not loaded
  };
  // The committed state, or else the one before, put into `instance`. An error: nothing is known
  // about the state, as where files cannot be opened now, or the instance holds a part of it.
  // UNAVAILABLE STATE_UNAVAILABLE.
  absl::StatusOr<Loaded> Load(ModuleInstance& instance);
  absl::Status Save(const ModuleInstance& instance, const SavedChange& change);
  // The files go with the object.
  void Forget() { forget_ = true; }

 private:
  // One slot of a commit record.
  struct Slot {
    std::string name;    // a or b; empty: there is none
    std::string digest;  // hexadecimal
  };
  ModuleState(StatePlace place, StateFolder folder, std::string module, Saved saved)
      : place_(std::move(place)),
        folder_(std::move(folder)),
        module_(std::move(module)),
        saved_(std::move(saved)) {}
  absl::StatusOr<std::vector<Slot>> ReadCommit() const;
  // DATA_LOSS: it must not be loaded; the instance is as it was.
  absl::StatusOr<SavedChange> LoadSlot(const Slot& slot, ModuleInstance& instance) const;
  absl::StatusOr<Slot> SaveInto(const std::string& slot, const ModuleInstance& instance,
                                const SavedChange& change) const;
  absl::Status Commit(const Slot& slot) const;

  const StatePlace place_;
  const StateFolder folder_;
  const std::string module_;
  const Saved saved_;
  Slot committed_;  // of the record
  bool forget_ = false;
};

}  // namespace attnd
