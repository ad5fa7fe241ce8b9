// LeaseTokens: the names of residual leases as callers hold them. A token says nothing to its
// holder and cannot be made by anyone else: it ends in an HMAC-SHA256 over the rest, with a key
// that is drawn at start and never leaves the process.
//
//   version 1 | replica 8 | boot epoch 8 | lease 8 | owner 8 | HMAC 32     65 bytes, little endian
//
// `owner` is a keyed hash of the caller's name, so that another caller's token is refused as such
// even when its lease is gone. A token of another replica is known by its number, one from before a
// restart by its epoch. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

inline constexpr size_t kLeaseTokenBytes = 65;

// Who makes tokens: `replica` stays over restarts, `boot_epoch` changes with each start.
struct TokenIssuer {
  uint64_t replica = 0;
  uint64_t boot_epoch = 0;
};

class LeaseTokens {
 public:
  // Draws a key.
  // `giver`: the method that gives them, for errors; static.
  explicit LeaseTokens(const TokenIssuer& issuer, absl::string_view giver = "Forward");

  std::string Make(uint64_t lease, absl::string_view owner) const;

  // The lease's number. Errors: INVALID_ARGUMENT when it is no token at all, FAILED_PRECONDITION
  // WRONG_REPLICA for another replica's and EPOCH_CHANGED for one of an earlier start,
  // PERMISSION_DENIED LEASE_NOT_OWNED for another owner's or a forged one.
  absl::StatusOr<uint64_t> Check(absl::string_view token, absl::string_view owner) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  Digest Sign(absl::string_view purpose, absl::string_view text) const;

  const TokenIssuer issuer_;
  const absl::string_view giver_;
  Digest key_;
};

}  // namespace attnd
