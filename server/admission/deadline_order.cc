#include "server/admission/deadline_order.h"

#include <algorithm>

#include "base/check.h"

namespace attnd {
namespace {

// So few calls say little about the pressure, and the device must not run dry.
constexpr int kFewCalls = 4;

}  // namespace

double DeadlineOrder::Service::End(double seconds) const {
  return kQueueMargin * pace * std::min(others_seconds + seconds, seconds * weights);
}

void DeadlineOrder::Insert(const Call& call) {
  auto at = std::upper_bound(calls_.begin(), calls_.end(), call,
                             [](const Call& a, const Call& b) { return a.place < b.place; });
  calls_.insert(at, call);
}

std::vector<DeadlineOrder::Call>::iterator DeadlineOrder::Find(const Place& place) {
  auto at =
      std::lower_bound(calls_.begin(), calls_.end(), place,
                       [](const Call& call, const Place& wanted) { return call.place < wanted; });
  CHECK(at != calls_.end() && at->place == place);
  return at;
}

void DeadlineOrder::Add(const Place& place, absl::Time deadline, double seconds) {
  Insert({place, deadline, seconds});
  seconds_ += seconds;
}

void DeadlineOrder::Start(const Place& place) {
  auto at = Find(place);
  Call call = *at;
  calls_.erase(at);
  call.place.due = kRunning;
  Insert(call);
}

void DeadlineOrder::Remove(const Place& place) {
  auto at = Find(place);
  seconds_ -= at->seconds;
  calls_.erase(at);
}

DeadlineOrder::Outlook DeadlineOrder::For(absl::Time due, double seconds, const Service& service,
                                          absl::Time now) const {
  Outlook outlook;
  double sum = 0, before = 0;
  int waiting = 0;
  for (const Call& call : calls_) {
    sum += call.seconds;
    const bool first = call.place.due <= due;
    if (first) before = sum;
    if (call.place.due == kRunning) continue;
    ++waiting;
    const double left = absl::ToDoubleSeconds(call.deadline - now);
    const double needed = service.End(sum);
    if (needed > left) continue;  // late by its estimate already: no reason to refuse others
    if (!first && service.End(sum + seconds) > left) outlook.breaks_another = true;
    outlook.pressure = std::max(outlook.pressure, needed / left);
  }
  if (waiting < kFewCalls) outlook.pressure = 0;
  outlook.ahead_seconds = service.pace * std::min(service.others_seconds + before,
                                                  (before + seconds) * service.weights - seconds);
  return outlook;
}

}  // namespace attnd
