// LeaseTokens: the names of residual leases as callers hold them. A token says nothing to its
// holder and cannot be made by anyone else: it ends in an HMAC-SHA256 over the rest, with a key
// that is drawn at start and never leaves the process.
//
//   version 1 | boot epoch 8 | lease 8 | owner 8 | HMAC 32      57 bytes; numbers little endian
//
// `owner` is a keyed hash of the caller's name, so that another caller's token is refused as such
// even when its lease is gone. A token of another process (before a restart, another replica) is
// known by its epoch. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

inline constexpr size_t kLeaseTokenBytes = 57;

class LeaseTokens {
 public:
  // Draws a key. `boot_epoch` changes with each start of the process.
  explicit LeaseTokens(uint64_t boot_epoch);

  std::string Make(uint64_t lease, absl::string_view owner) const;

  // The lease's number. Errors: INVALID_ARGUMENT when it is no token at all, FAILED_PRECONDITION
  // EPOCH_CHANGED for another process', PERMISSION_DENIED LEASE_NOT_OWNED for another owner's or a
  // forged one.
  absl::StatusOr<uint64_t> Check(absl::string_view token, absl::string_view owner) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  Digest Sign(absl::string_view purpose, absl::string_view text) const;

  const uint64_t boot_epoch_;
  Digest key_;
};

}  // namespace attnd
