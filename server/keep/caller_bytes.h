// CallerBytes: bytes in use, of all callers and of each. Not thread-safe: it is guarded by the
// mutex of the class that has it, which checks its limits before it adds.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace attnd {

class CallerBytes {
 public:
  int64_t all() const { return all_; }
  int64_t Of(absl::string_view caller) const {
    const auto found = by_caller_.find(caller);
    return found == by_caller_.end() ? 0 : found->second;
  }
  // Below 0: gives back. A caller with nothing leaves no trace.
  void Add(absl::string_view caller, int64_t bytes) {
    all_ += bytes;
    const auto found = by_caller_.try_emplace(caller).first;
    found->second += bytes;
    if (found->second == 0) by_caller_.erase(found);
  }

 private:
  int64_t all_ = 0;
  absl::flat_hash_map<std::string, int64_t> by_caller_;
};

}  // namespace attnd
