// Digests. SHA-256: of bytes, or of what is added piece after piece (RunningDigest, one thread).
// PayloadDigests: whether two payloads are the same bytes, for the ledger of one process. A digest
// is Poly1305's under a key of the process that nobody is told: two payloads of L bytes have one
// with a probability of L / 2^107 at most, however they were chosen. Where OpenSSL has no Poly1305,
// it is SHA-256, which takes longer. Any thread. Source: Bernstein, The Poly1305-AES
// message-authentication code (2005), theorem 3.3.
#pragma once

#include <openssl/evp.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace attnd {

class RunningDigest {
 public:
  RunningDigest();
  void Add(absl::string_view bytes);
  std::string Final();  // 32 bytes; once

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

std::string DigestOf(absl::string_view bytes);  // 32 bytes

class PayloadDigests {
 public:
  PayloadDigests();
  std::string Of(absl::Span<const std::byte> bytes) const;

 private:
  const std::string key_;
};

}  // namespace attnd
