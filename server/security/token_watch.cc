#include "server/security/token_watch.h"

#include <utility>

namespace attnd {

TokenWatch::TokenWatch(std::string path, absl::Duration period, Authenticator& auth, Logger& log)
    : path_(std::move(path)), auth_(auth), log_(log), looks_(period, [this] { Look(); }) {}

void TokenWatch::Look() {
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<Authenticator> fresh = Authenticator::FromTokenFile(path_);
  std::string fault(fresh.status().message());
  if (fresh.ok() && auth_.Replace(*std::move(fresh))) log_.Info("tokens_changed");
  if (!fault.empty() && fault != last_fault_) {
    log_.Warning("tokens_kept",
                 {{"message", fault}, {"cure", "correct the file; the former tokens stay in use"}});
  }
  last_fault_ = std::move(fault);
}

}  // namespace attnd
