#include "server/keep/mask_workers.h"

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

MaskWorkers::MaskWorkers(int threads, int64_t caller_max_calls)
    : caller_max_calls_(caller_max_calls) {
  for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { Main(); });
}

MaskWorkers::~MaskWorkers() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status MaskWorkers::Run(absl::string_view caller, std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  const auto [found, is_new] = callers_.try_emplace(std::string(caller));
  auto& waiting = found->second.waiting;
  if (static_cast<int64_t>(waiting.size()) >= caller_max_calls_) {
    return OverQuota(caller, caller_max_calls_);
  }
  waiting.push_back(std::move(work));
  ++waiting_;
  if (is_new) turns_.push_back(found->first);
  return absl::OkStatus();
}

int64_t MaskWorkers::waiting() const {
  absl::MutexLock lock(&mutex_);
  return waiting_;
}

bool MaskWorkers::Take(std::string& caller, std::function<void()>& work) {
  auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !turns_.empty() || (stopping_ && callers_.empty());
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&ready));
  if (turns_.empty()) return false;
  caller = std::move(turns_.front());
  turns_.pop_front();
  auto& waiting = callers_.find(caller)->second.waiting;
  work = std::move(waiting.front());
  waiting.pop_front();
  --waiting_;
  return true;
}

void MaskWorkers::GiveBack(const std::string& caller) {
  absl::MutexLock lock(&mutex_);
  auto found = callers_.find(caller);
  if (found->second.waiting.empty()) {
    callers_.erase(found);
  } else {
    turns_.push_back(caller);
  }
}

void MaskWorkers::Main() {
  std::string caller;
  std::function<void()> work;
  while (Take(caller, work)) {
    work();
    work = nullptr;
    GiveBack(caller);
  }
}

}  // namespace attnd
