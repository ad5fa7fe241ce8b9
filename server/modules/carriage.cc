#include "server/modules/carriage.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/stop_wakes.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr absl::Duration kComingPatience = absl::Seconds(2);

absl::Status CarryFailed(absl::string_view call) {
  return Failure(absl::StatusCode::kCancelled, reason::kCancelled,
                 absl::StrCat("carry: the call of that name ", call));
}
absl::Status CallEnded() { return CarryFailed("has ended"); }

}  // namespace

absl::Status Carriage::Admit(const std::vector<PlacedPayload>& payloads) {
  absl::MutexLock lock(&mutex_);
  if (admitted_ || ended_) {
    return FieldError(reason::kBadField, "carry", "a name that no other call has", "another's");
  }
  admitted_ = true;
  for (const PlacedPayload& payload : payloads) {
    if (!payload.IsReceived()) continue;
    inputs_.push_back({payload, ChunkGrid(payload.spec.bytes)});
    input_bytes_ += payload.spec.bytes;
  }
  missing_bytes_ = input_bytes_;
  return absl::OkStatus();
}

absl::Status Carriage::AwaitLanded(const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return missing_bytes_ == 0 || bringing_ == 0 || !broken_.ok() || wait.stop.stop_requested();
  };
  const bool in_time = mutex_.AwaitWithTimeout(absl::Condition(&over), wait.deadline - SteadyNow());
  if (missing_bytes_ == 0) {
    inputs_.clear();
    return absl::OkStatus();
  }
  if (!broken_.ok()) return broken_;
  if (!in_time || wait.stop.stop_requested()) return wait.Stopped();
  // A stream whose connection ends may look like one that is done.
  if (has_others_) return CarryFailed("has lost a stream with chunks");
  return FieldError(reason::kChunkOrder, "chunk",
                    absl::StrCat(input_bytes_, " bytes in chunks before half-close"),
                    absl::StrCat(input_bytes_ - missing_bytes_));
}

void Carriage::Leave(std::shared_ptr<ChunkQueue> chunks) {
  absl::MutexLock lock(&mutex_);
  leaving_ = std::move(chunks);
}

void Carriage::End() {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  inputs_.clear();
}

int64_t Carriage::input_bytes() const {
  absl::MutexLock lock(&mutex_);
  return input_bytes_;
}

absl::StatusOr<Carriage::Place> Carriage::Claim(uint64_t field, uint64_t offset, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return CallEnded();
  for (Input& input : inputs_) {
    if (static_cast<uint64_t>(input.payload.spec.field) != field) continue;
    if (!input.grid.Take(offset, bytes)) break;
    return Place{input.payload.data + offset, input.payload.block};
  }
  return FieldError(reason::kChunkOrder, "chunk",
                    absl::StrCat("one of ", kChunkBytes, " bytes, or the last one, of a payload, ",
                                 "which has not come before"),
                    absl::StrCat(bytes, " bytes of field ", field, " from byte ", offset));
}

void Carriage::Landed(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  missing_bytes_ -= bytes;
}

absl::Status Carriage::AwaitAdmitted(const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return admitted_ || ended_ || wait.stop.stop_requested();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&over),
                          std::min(wait.deadline - SteadyNow(), kComingPatience));
  if (ended_) return CallEnded();
  if (admitted_) {
    ++bringing_;
    has_others_ = true;
    return absl::OkStatus();
  }
  if (wait.stop.stop_requested() || SteadyNow() >= wait.deadline) return wait.Stopped();
  return CarryFailed(absl::StrCat("has not come within ", absl::FormatDuration(kComingPatience)));
}

void Carriage::BroughtAll(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  --bringing_;
  if (!status.ok() && broken_.ok()) broken_ = status;
}

absl::StatusOr<std::shared_ptr<ChunkQueue>> Carriage::AwaitLeaving(const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return leaving_ != nullptr || ended_ || wait.stop.stop_requested();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&over), wait.deadline - SteadyNow());
  if (leaving_ != nullptr) return leaving_;
  return ended_ ? CallEnded() : wait.Stopped();
}

std::shared_ptr<Carriage> Carriages::Of(const std::string& caller, const std::string& name) {
  absl::MutexLock lock(&mutex_);
  std::weak_ptr<Carriage>& known = carriages_[{caller, name}];
  std::shared_ptr<Carriage> carriage = known.lock();
  if (carriage == nullptr) {
    carriage = std::make_shared<Carriage>();
    known = carriage;
    std::erase_if(carriages_, [](const auto& entry) { return entry.second.expired(); });
  }
  return carriage;
}

}  // namespace attnd
