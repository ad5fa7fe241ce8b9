#include "server/modules/running_digest.h"

#include <openssl/sha.h>

#include "base/check.h"

namespace attnd {

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

}  // namespace attnd
