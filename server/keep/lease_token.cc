#include "server/keep/lease_token.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr char kVersion = 2;
constexpr size_t kReplicaAt = 1, kEpochAt = 9, kLeaseAt = 17, kOwnerAt = 25, kDigestAt = 33;
// Before tokens named their replica.
constexpr char kFirstVersion = 1;
constexpr size_t kFirstVersionBytes = 57;

void Append(uint64_t number, std::string& out) {
  for (int n = 0; n < 8; ++n) out.push_back(static_cast<char>(number >> (8 * n)));
}

uint64_t NumberAt(absl::string_view text, size_t at) {
  uint64_t number = 0;
  for (int n = 7; n >= 0; --n) number = number << 8 | static_cast<unsigned char>(text[at + n]);
  return number;
}

bool Same(const void* a, const void* b, size_t size) { return CRYPTO_memcmp(a, b, size) == 0; }

absl::Status EpochChanged() {
  return Failure(absl::StatusCode::kFailedPrecondition, reason::kEpochChanged,
                 "residual_token: made before this server started; send the tensors");
}

absl::Status NotOwned() {
  return Failure(absl::StatusCode::kPermissionDenied, reason::kLeaseNotOwned,
                 "residual_token: not a token of this caller; send the tensors");
}

}  // namespace

LeaseTokens::LeaseTokens(const TokenIssuer& issuer, absl::string_view giver)
    : issuer_(issuer), giver_(giver) {
  CHECK(RAND_bytes(key_.data(), static_cast<int>(key_.size())) == 1);
}

LeaseTokens::Digest LeaseTokens::Sign(absl::string_view purpose, absl::string_view text) const {
  std::string message = absl::StrCat(purpose, ":", text);
  Digest digest;
  unsigned size = 0;
  CHECK(HMAC(EVP_sha256(), key_.data(), static_cast<int>(key_.size()),
             reinterpret_cast<const unsigned char*>(message.data()), message.size(), digest.data(),
             &size) != nullptr);
  CHECK(size == digest.size());
  return digest;
}

std::string LeaseTokens::Make(uint64_t lease, absl::string_view owner) const {
  std::string token(1, kVersion);
  Append(issuer_.replica, token);
  Append(issuer_.boot_epoch, token);
  Append(lease, token);
  Digest name = Sign("owner", owner);
  token.append(reinterpret_cast<const char*>(name.data()), kDigestAt - kOwnerAt);
  Digest seal = Sign("token", token);
  token.append(reinterpret_cast<const char*>(seal.data()), seal.size());
  return token;
}

absl::StatusOr<uint64_t> LeaseTokens::Check(absl::string_view token,
                                            absl::string_view owner) const {
  if (token.size() == kFirstVersionBytes && token[0] == kFirstVersion) return EpochChanged();
  if (token.size() != kLeaseTokenBytes || token[0] != kVersion) {
    return FieldError(reason::kBadField, "residual_token",
                      absl::StrCat("a token that ", giver_, " gave"),
                      absl::StrCat("another text of ", token.size(), " bytes"));
  }
  if (NumberAt(token, kReplicaAt) != issuer_.replica) {
    return Failure(absl::StatusCode::kFailedPrecondition, reason::kWrongReplica,
                   "residual_token: made by another replica; ask that one, or send the tensors");
  }
  if (NumberAt(token, kEpochAt) != issuer_.boot_epoch) return EpochChanged();
  Digest seal = Sign("token", token.substr(0, kDigestAt));
  Digest name = Sign("owner", owner);
  bool genuine = Same(seal.data(), token.data() + kDigestAt, seal.size());
  bool own = Same(name.data(), token.data() + kOwnerAt, kDigestAt - kOwnerAt);
  if (!genuine || !own) return NotOwned();
  return NumberAt(token, kLeaseAt);
}

}  // namespace attnd
