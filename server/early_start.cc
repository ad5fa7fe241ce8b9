#include "server/early_start.h"

#include <algorithm>
#include <utility>

namespace attnd {

EarlyStart::EarlyStart(AdmittedCall& call, Tensor last, Workers& workers, const Clock& clock,
                       std::stop_token stop, std::function<void()> hold,
                       std::function<void()> release)
    : call_(call),
      parts_(call.call()),
      last_(last),
      workers_(workers),
      clock_(clock),
      begin_(clock.Now()),
      stop_(std::move(stop)),
      hold_(std::move(hold)),
      release_(std::move(release)) {
  for (const TensorSource& input : call.call().inputs()) bytes_ += input.range.size;
}

void EarlyStart::ChunkLands(int64_t bytes, int64_t of_last) {
  absl::MutexLock lock(&mutex_);
  ++landing_;
  received_ += bytes;
  of_last_ = of_last;
}

void EarlyStart::ChunkLanded() {
  {
    absl::MutexLock lock(&mutex_);
    if (--landing_ > 0) return;  // whose bytes may lie before this one's
    landed_ = of_last_;
  }
  LaunchWhatIsWhole();
}

void EarlyStart::End() {
  absl::MutexLock lock(&mutex_);
  over_ = true;
}

absl::Duration EarlyStart::ExpectedArrival() const {
  return (clock_.Now() - begin_) * static_cast<double>(bytes_ - received_) /
         static_cast<double>(received_);
}

// But for the last part: when that is whole, so is the call, and its own launch is due.
void EarlyStart::LaunchWhatIsWhole() {
  int64_t whole;
  absl::Duration arrival;
  {
    absl::MutexLock lock(&mutex_);
    if (running_ || over_ || stop_.stop_requested()) return;
    whole = std::min(parts_.Complete(last_, landed_), parts_.count() - 1);
    if (whole <= call_.early_parts()) return;
    running_ = true;
    arrival = ExpectedArrival();
  }
  hold_();
  auto done = [this, whole] { OnComputed(whole); };
  if (workers_.ComputeEarly(call_, parts_, whole, arrival, stop_, done)) return;
  {
    absl::MutexLock lock(&mutex_);
    running_ = false;
  }
  release_();
}

void EarlyStart::OnComputed(int64_t whole) {
  {
    absl::MutexLock lock(&mutex_);
    running_ = false;
    if (call_.early_parts() < whole) over_ = true;  // it failed: the whole call shall tell how
  }
  LaunchWhatIsWhole();
  release_();
}

}  // namespace attnd
