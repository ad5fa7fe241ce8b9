// EarlyPlaces: how many micro-batches of all modules wait for those before them. Each has a place
// among the module calls meanwhile, so that the ones that they wait for could not get in.
//
// A caller may have kMaxEarlyMicroBatches, of whichever modules, and all callers twice as many.
// Any thread; outlives its Places.
#pragma once

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/keep/caller_bytes.h"

namespace attnd {

inline constexpr int kMaxEarlyMicroBatches = 12;

class EarlyPlaces {
 public:
  // One of them, given back when it goes; false: there was none.
  class Place {
   public:
    Place() = default;
    Place(EarlyPlaces& places, std::string caller) : places_(&places), caller_(std::move(caller)) {}
    Place(Place&& other) noexcept
        : places_(std::exchange(other.places_, nullptr)), caller_(std::move(other.caller_)) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (places_ != nullptr) places_->Add(caller_, -1);
    }
    explicit operator bool() const { return places_ != nullptr; }

   private:
    EarlyPlaces* places_ = nullptr;
    std::string caller_;
  };

  bool HasRoom(const std::string& caller) const {
    absl::MutexLock lock(&mutex_);
    return HasRoomFor(caller);
  }
  Place Take(const std::string& caller) {
    absl::MutexLock lock(&mutex_);
    if (!HasRoomFor(caller)) return Place();
    taken_.Add(caller, 1);
    return Place(*this, caller);
  }

 private:
  bool HasRoomFor(const std::string& caller) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return taken_.Of(caller) < kMaxEarlyMicroBatches && taken_.all() < 2 * kMaxEarlyMicroBatches;
  }
  void Add(const std::string& caller, int count) {
    absl::MutexLock lock(&mutex_);
    taken_.Add(caller, count);
  }

  mutable absl::Mutex mutex_;
  CallerBytes taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
