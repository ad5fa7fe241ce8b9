#include "server/modules/running_digest.h"

#include <openssl/rand.h>
#include <openssl/sha.h>

#include "base/check.h"

namespace attnd {
namespace {

constexpr size_t kPolyKeyBytes = 32, kPolyBytes = 16;

std::string RandomKey() {
  std::string key(kPolyKeyBytes, '\0');
  CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(key.data()), kPolyKeyBytes) == 1);
  return key;
}

template <auto kFree>
struct FreeBy {
  template <class T>
  void operator()(T* pointer) const {
    kFree(pointer);
  }
};

}  // namespace

RunningDigest::RunningDigest() : context_(EVP_MD_CTX_new()) {
  CHECK(context_ != nullptr);
  CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void RunningDigest::Add(absl::string_view bytes) {
  CHECK(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::string RunningDigest::Final() {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  CHECK(EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()),
                           nullptr) == 1);
  return digest;
}

std::string DigestOf(absl::string_view bytes) {
  RunningDigest digest;
  digest.Add(bytes);
  return digest.Final();
}

PayloadDigests::PayloadDigests() : key_(RandomKey()) {}

std::string PayloadDigests::Of(absl::Span<const std::byte> bytes) const {
  const std::unique_ptr<EVP_MAC, FreeBy<&EVP_MAC_free>> poly(
      EVP_MAC_fetch(nullptr, "POLY1305", nullptr));
  if (poly == nullptr) {  // as where OpenSSL has FIPS' algorithms alone
    return DigestOf({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  const std::unique_ptr<EVP_MAC_CTX, FreeBy<&EVP_MAC_CTX_free>> context(
      EVP_MAC_CTX_new(poly.get()));
  const auto* key = reinterpret_cast<const unsigned char*>(key_.data());
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  std::string digest(kPolyBytes, '\0');
  size_t size = 0;
  CHECK(context != nullptr && EVP_MAC_init(context.get(), key, key_.size(), nullptr) == 1);
  CHECK(EVP_MAC_update(context.get(), data, bytes.size()) == 1);
  CHECK(EVP_MAC_final(context.get(), reinterpret_cast<unsigned char*>(digest.data()), &size,
                      digest.size()) == 1);
  CHECK(size == kPolyBytes);
  return digest;
}

}  // namespace attnd
