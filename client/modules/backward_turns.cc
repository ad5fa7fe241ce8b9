#include "client/modules/backward_turns.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status_macros.h"
#include "client/call/poll_hook.h"

namespace attnd {
namespace {

absl::Status IsOver() {
  return absl::FailedPreconditionError(
      "turn: expected one that was reserved, with no backward before it that has failed or was "
      "given up: clear the gradients, and call the step's backwards again");
}

}  // namespace

BackwardTurns::Pause::Pause(BackwardTurns& turns) : turns_(turns) {
  std::vector<std::stop_source> stopped;
  {
    absl::MutexLock lock(&turns_.mutex_);
    ++turns_.pauses_;
    for (const auto& [number, turn] : turns_.turns_) stopped.push_back(turn.stop);
  }
  for (std::stop_source& stop : stopped) stop.request_stop();
}

BackwardTurns::Pause::~Pause() {
  absl::MutexLock lock(&turns_.mutex_);
  if (--turns_.pauses_ > 0) return;
  for (auto& [number, turn] : turns_.turns_) turn.stop = std::stop_source();
}

uint64_t BackwardTurns::Reserve() {
  absl::MutexLock lock(&mutex_);
  turns_.try_emplace(++last_);
  return last_;
}

absl::Status BackwardTurns::WaitUntil(absl::FunctionRef<bool()> ready, absl::Time deadline,
                                      const CallOptions& options) {
  for (PollHook poll_hook(options.poll_hook); SteadyNow() < deadline; poll_hook.Poll()) {
    absl::MutexLock lock(&mutex_);
    const absl::Time until = std::min(deadline, SteadyNow() + PollHook::kInterval);
    if (!mutex_.AwaitWithTimeout(absl::Condition(&ready), until - SteadyNow())) continue;
    if (!options.stop.stop_requested()) return absl::OkStatus();
    return absl::CancelledError("the caller cancelled the call");
  }
  return absl::DeadlineExceededError("the deadline passed while the call waited for its turn");
}

absl::Status BackwardTurns::Await(uint64_t turn, absl::Time deadline, const CallOptions& options) {
  auto ready = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const auto& [number, other] : turns_) {
      if (number >= turn) return true;
      if (!other.has_begun) return !turns_.contains(turn);
    }
    return true;
  };
  RETURN_IF_ERROR(WaitUntil(ready, deadline, options));
  return Check(turn);
}

void BackwardTurns::Begin(uint64_t turn) {
  absl::MutexLock lock(&mutex_);
  if (auto mine = turns_.find(turn); mine != turns_.end()) mine->second.has_begun = true;
}

absl::StatusOr<std::stop_token> BackwardTurns::Try(uint64_t turn, absl::Time deadline,
                                                   const CallOptions& options) {
  auto ready = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return pauses_ == 0 || !turns_.contains(turn);
  };
  RETURN_IF_ERROR(WaitUntil(ready, deadline, options));
  absl::MutexLock lock(&mutex_);
  const auto mine = turns_.find(turn);
  if (mine == turns_.end()) return IsOver();
  return mine->second.stop.get_token();
}

absl::Status BackwardTurns::Check(uint64_t turn) const {
  absl::MutexLock lock(&mutex_);
  return turns_.contains(turn) ? absl::OkStatus() : IsOver();
}

void BackwardTurns::End(uint64_t turn) {
  absl::MutexLock lock(&mutex_);
  turns_.erase(turn);
}

void BackwardTurns::GiveUp(uint64_t turn) {
  std::map<uint64_t, Turn> over;
  {
    absl::MutexLock lock(&mutex_);
    const auto first = turns_.find(turn);
    for (auto one = first; one != turns_.end();) over.insert(turns_.extract(one++));
  }
  for (auto& [number, given_up] : over) given_up.stop.request_stop();
}

}  // namespace attnd
