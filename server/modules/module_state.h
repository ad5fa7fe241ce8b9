// ModuleState: what of a module outlives the process (DURABILITY_HOST): weights, moments and the
// ledger's last change, in files of a folder that is memory of the host, such as a tmpfs.
//
//   DIR/<SHA-256 of caller and name>/a.safetensors, b.safetensors   two slots, written in turn
//                                    commit                         which one counts, and its
//                                    SHA-256 lock                           of the process that has
//                                    it
//
// A slot is whole before the commit record names it, and the record is replaced by rename. So a
// process that is killed at any moment leaves the last state that was committed. What is damaged,
// half written or of another module is told and never loaded. Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "modules/module_engine.h"

namespace attnd {

// The ledger's part of a state.
struct SavedChange {
  uint64_t sequence = 0;
  std::string digest, reply;  // of the change that made it
};

class ModuleState {
 public:
  // Makes the folder and takes its lock. `module`: a digest of layout and optimizer. UNAVAILABLE
  // where files cannot be made, FAILED_PRECONDITION MODULE_EXISTS where another process has it.
  static absl::StatusOr<std::unique_ptr<ModuleState>> Open(const std::string& folder,
                                                           const std::string& caller,
                                                           const std::string& name,
                                                           const std::string& module);
  ~ModuleState();

  // Of both slots.
  static int64_t BytesOf(const ModuleDescription& module);

  // The committed state, put into `instance`. Nothing: there is none. DATA_LOSS: there is one that
  // must not be loaded, and why; the instance is as it was. Any other error: it is not.
  absl::StatusOr<std::optional<SavedChange>> Load(ModuleInstance& instance);
  absl::Status Save(const ModuleInstance& instance, const SavedChange& change);
  // The files go with the object.
  void Forget() { forget_ = true; }

 private:
  ModuleState(std::string path, std::string module, int lock)
      : path_(std::move(path)), module_(std::move(module)), lock_(lock) {}

  const std::string path_, module_;
  const int lock_;  // descriptor
  bool next_is_b_ = false;
  bool forget_ = false;
};

}  // namespace attnd
