// Authenticator: who calls. With a token file every call of service Attention brings one of its
// tokens ("authorization: Bearer ..."), compared in constant time; with client certificates the
// certificate's name; otherwise the peer's address without its port. The name serves quotas and
// fair queueing and stands in logs; tokens never do. Any thread, also while tokens are replaced.
#pragma once

#include <grpcpp/server_context.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class Authenticator {
 public:
  // Takes every caller by its address or certificate.
  Authenticator();
  // One "name token" per line, "#" begins a comment; a token has at least 16 printable
  // ASCII bytes and one name, a name any number of tokens.
  // INVALID_ARGUMENT naming the line, or for what is no file; NOT_FOUND when it cannot be read.
  static absl::StatusOr<Authenticator> FromTokenFile(const std::string& path);
  static absl::StatusOr<Authenticator> FromTokenText(absl::string_view text);

  // Takes over the tokens of `other`; false when they are the same.
  bool Replace(Authenticator other);

  // The caller's name, or UNAUTHENTICATED TOKEN_MISSING or TOKEN_INVALID. `peer`: the context's.
  absl::StatusOr<std::string> Identify(const grpc::ServerContextBase& context,
                                       absl::string_view peer) const;
  // The name of calls that come over a unix socket with this value of "authorization".
  absl::StatusOr<std::string> IdentifyLocal(absl::string_view header) const;
  // The token check alone: `header` is the value of "authorization".
  absl::StatusOr<std::string> CheckToken(absl::string_view header) const;

 private:
  struct Entry {
    std::string name, token;
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  using Entries = std::vector<Entry>;
  struct Current {
    absl::Mutex mutex;
    std::shared_ptr<const Entries> entries ABSL_GUARDED_BY(mutex);  // and of checks that run
  };
  std::shared_ptr<const Entries> entries() const;

  std::unique_ptr<Current> current_;  // so that an Authenticator can be moved
};

// Returns what is wrong with who may read the token file; "" when its owner and group alone may.
std::string TokenFileExposure(const std::string& path);

// "ipv4:10.0.0.1:4711" → "10.0.0.1", "unix:..." → "unix".
std::string CallerOfPeer(absl::string_view peer);

}  // namespace attnd
