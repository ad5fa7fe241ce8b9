// TokenWatch: reads the token file again when it changes, so that tokens come and go without a
// restart. A file that cannot be read or understood changes nothing: the old tokens stay, and the
// log says why, once.
//
// Threads: it has one of its own; Look may be called from any.
#pragma once

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/periodic.h"
#include "server/security/auth.h"

namespace attnd {

class TokenWatch {
 public:
  // `auth` has the file's tokens; it and `log` outlive this.
  TokenWatch(std::string path, absl::Duration period, Authenticator& auth, Logger& log);

  void Look();  // now

 private:
  const std::string path_;
  Authenticator& auth_;
  Logger& log_;
  absl::Mutex mutex_;
  std::string last_fault_ ABSL_GUARDED_BY(mutex_);
  Periodic looks_;
};

}  // namespace attnd
