#include "server/rpc/mask_workers.h"

#include "absl/strings/str_cat.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

// About what a mask takes that is worth waiting for.
constexpr absl::Duration kRetryDelay = absl::Milliseconds(100);

absl::Status OverQuota(absl::string_view caller, int64_t limit) {
  const std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(limit + 1);
  absl::Status status = Failure(
      absl::StatusCode::kResourceExhausted, reason::kTenantQuota,
      absl::StrCat("quota of caller ", caller, ": calls whose masks wait to be compiled at ",
                   "most ", limit_text, ", this call would make it ", wanted_text),
      {{"caller", caller}, {"limit", limit_text}, {"wanted", wanted_text}});
  return WithRetryAfter(std::move(status), kRetryDelay);
}

}  // namespace

absl::Status MaskWorkers::Run(absl::string_view caller, std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  const auto [found, is_new] = callers_.try_emplace(std::string(caller));
  auto& waiting = found->second;
  if (static_cast<int64_t>(waiting.size()) >= caller_max_calls_) {
    return OverQuota(caller, caller_max_calls_);
  }
  waiting.push_back(std::move(work));
  ++waiting_;
  if (is_new) turns_.Run([this, caller = found->first] { TakeTurn(caller); });
  return absl::OkStatus();
}

int64_t MaskWorkers::waiting() const {
  absl::MutexLock lock(&mutex_);
  return waiting_;
}

void MaskWorkers::TakeTurn(const std::string& caller) {
  Next(caller)();
  absl::MutexLock lock(&mutex_);
  const auto found = callers_.find(caller);
  if (!found->second.empty()) return turns_.Run([this, caller] { TakeTurn(caller); });
  callers_.erase(found);
}

std::function<void()> MaskWorkers::Next(const std::string& caller) {
  absl::MutexLock lock(&mutex_);
  auto& waiting = callers_.find(caller)->second;
  std::function<void()> work = std::move(waiting.front());
  waiting.pop_front();
  --waiting_;
  return work;
}

}  // namespace attnd
