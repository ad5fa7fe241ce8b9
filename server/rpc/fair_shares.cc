#include "server/rpc/fair_shares.h"

namespace attnd {
namespace {

// An address may hold this multiple of what stays free: as much as four callers get.
constexpr int64_t kOfAddress = 15;

}  // namespace

FairShares::Share::~Share() {
  if (shares_ != nullptr) shares_->GiveBack(holder_, amount_);
}

FairShares::Outcome FairShares::Take(const Holder& holder, int64_t amount, Share& share) {
  const Outcome outcome = Add(holder, amount);
  if (outcome != Outcome::kTaken) return outcome;
  share.shares_ = this;
  share.holder_ = holder;
  share.amount_ = amount;
  return outcome;
}

FairShares::Outcome FairShares::Grow(Share& share, int64_t more) {
  const Outcome outcome = Add(share.holder_, more);
  if (outcome == Outcome::kTaken) share.amount_ += more;
  return outcome;
}

FairShares::Outcome FairShares::Add(const Holder& holder, int64_t amount) {
  absl::MutexLock lock(&mutex_);
  const int64_t left = all_ - by_caller_.all() - amount;
  const int64_t of_caller = by_caller_.Of(holder.caller) + amount;
  const int64_t of_address = by_address_.Of(holder.address) + amount;
  if (of_caller > left || of_address > kOfAddress * left) {
    const bool own =
        of_caller > most_of_caller() || of_address > all_ / (kOfAddress + 1) * kOfAddress;
    return own ? Outcome::kOwnIsFull : Outcome::kFull;
  }
  by_caller_.Add(holder.caller, amount);
  by_address_.Add(holder.address, amount);
  return Outcome::kTaken;
}

void FairShares::GiveBack(const Holder& holder, int64_t amount) {
  absl::MutexLock lock(&mutex_);
  by_caller_.Add(holder.caller, -amount);
  by_address_.Add(holder.address, -amount);
}

int64_t FairShares::held() const {
  absl::MutexLock lock(&mutex_);
  return by_caller_.all();
}

}  // namespace attnd
