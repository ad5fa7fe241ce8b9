// SHA-256: of bytes, or of what is added piece after piece (RunningDigest, one thread).
#pragma once

#include <openssl/evp.h>

#include <memory>
#include <string>

#include "absl/strings/string_view.h"

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

}  // namespace attnd
