// FairShares: an amount of something (places, bytes) that all callers share, so that few of them
// cannot take it all. A caller may hold as much as stays free beside it: alone half, a second one
// beside it a quarter, a third an eighth. An address may hold as much as four callers get, since
// behind a proxy it is that of many.
// A Share gives back when it goes. Any thread; outlives its shares.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/keep/caller_bytes.h"

namespace attnd {

class FairShares {
 public:
  struct Holder {
    std::string caller, address;
  };

  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept { *this = std::move(other); }
    Share& operator=(Share&& other) noexcept {
      std::swap(shares_, other.shares_);
      std::swap(holder_, other.holder_);
      std::swap(amount_, other.amount_);
      return *this;
    }
    ~Share();
    int64_t amount() const { return amount_; }

   private:
    friend class FairShares;
    FairShares* shares_ = nullptr;  // null: nothing is held
    Holder holder_;
    int64_t amount_ = 0;
  };

  explicit FairShares(int64_t amount) : all_(amount) {}

  // kOwnIsFull: the holder would have more than it may ever have; kFull: others hold too much now.
  enum class Outcome { kTaken, kOwnIsFull, kFull };
  // Takes `amount` into an empty share.
  Outcome Take(const Holder& holder, int64_t amount, Share& share);
  // Takes so much more into a share that holds something.
  Outcome Grow(Share& share, int64_t more);

  int64_t all() const { return all_; }
  int64_t most_of_caller() const { return all_ / 2; }
  int64_t held() const;

 private:
  Outcome Add(const Holder& holder, int64_t amount);
  void GiveBack(const Holder& holder, int64_t amount);

  const int64_t all_;
  mutable absl::Mutex mutex_;
  CallerBytes by_caller_ ABSL_GUARDED_BY(mutex_), by_address_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
