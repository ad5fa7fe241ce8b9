// How AttndServer ends: in peace, or at once.
#include <algorithm>

#include "absl/time/clock.h"
#include "base/clock.h"
#include "server/app/attnd_server.h"
#include "server/modules/modules.h"
#include "server/rpc/calls.h"
#include "server/rpc/rpc_server.h"

namespace attnd {
namespace {

constexpr absl::Duration kQuietBeforeClosing = absl::Milliseconds(300);
// Callers that come again at once, without end, are refused either way.
constexpr absl::Duration kMostWaitForQuiet = absl::Seconds(3);
// For owners of modules to take them elsewhere, since their last call.
constexpr absl::Duration kWaitForMove = absl::Seconds(5);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(20);
// For connections to end in peace once every call is answered.
constexpr absl::Duration kGoodbye = absl::Seconds(1);

}  // namespace

void AttndServer::Drain(absl::Duration delay, absl::Duration timeout,
                        const std::function<bool(absl::Duration)>& wait) {
  metrics_.SetDraining();
  SetServing(false);
  if (!WaitForBalancers(delay, wait)) return StopNow();
  calls_->admission().StartDraining();
  if (modules_ != nullptr) modules_->StartDraining();
  absl::Time deadline = SteadyNow() + timeout;
  if (!WaitUntilCallersLeave(deadline, wait)) return StopNow();
  rpc_->StopAccepting();
  if (!WaitUntilAnswered(deadline, wait)) return StopNow();
  if (const auto left = calls_->open().count(); left > 0) {
    log_.Warning("drain_cut", {{"calls", left},
                               {"modules", modules_ == nullptr ? 0 : modules_->table().size()},
                               {"cure", "a longer --drain_timeout, or shorter deadlines"}});
  }
  if (modules_ != nullptr) modules_->table().SaveAll();
  // Calls that are open now are watchers of health and the like, which would stay for ever.
  rpc_->Shutdown(std::min(deadline, SteadyNow() + kGoodbye));
}

bool AttndServer::WaitOut(absl::Duration time) {
  absl::SleepFor(time);
  return true;
}

// Until they have noticed that this server is NOT_SERVING; not for one without a device, whose
// restart is what callers wait for.
bool AttndServer::WaitForBalancers(absl::Duration delay,
                                   const std::function<bool(absl::Duration)>& wait) {
  const absl::Time end = SteadyNow() + delay;
  do {
    const absl::Duration left = std::max(end - SteadyNow(), absl::ZeroDuration());
    if (!wait(std::min(kDrainPoll, left))) return false;
  } while (SteadyNow() < end && !all_devices_lost());
  return true;
}

bool AttndServer::WaitUntilCallersLeave(absl::Time deadline,
                                        const std::function<bool(absl::Duration)>& wait) {
  absl::Time begin = SteadyNow();
  deadline = std::min(deadline, begin + kMostWaitForQuiet);
  for (absl::Time now = begin; now < deadline; now = SteadyNow()) {
    absl::Time quiet_since = std::max(begin, calls_->admission().last_refused_at());
    if (now - quiet_since >= kQuietBeforeClosing) return true;
    if (!wait(std::min(kDrainPoll, deadline - now))) return false;
  }
  return true;
}

bool AttndServer::WaitUntilAnswered(absl::Time deadline,
                                    const std::function<bool(absl::Duration)>& wait) {
  auto moves = [this] {
    return modules_ != nullptr && modules_->table().AnyUsedWithin(kWaitForMove);
  };
  while ((calls_->open().count() > 0 || moves()) && SteadyNow() < deadline) {
    if (!wait(kDrainPoll)) return false;
  }
  return true;
}

void AttndServer::StopNow() {
  calls_->admission().StartDraining();
  if (modules_ != nullptr) modules_->StartDraining();
  rpc_->StopAccepting();
  rpc_->Shutdown(SteadyNow());
}

}  // namespace attnd
