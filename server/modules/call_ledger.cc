#include "server/modules/call_ledger.h"

#include <utility>

#include "server/modules/module_errors.h"

namespace attnd {

absl::Status CallLedger::CheckSequence(uint64_t sequence) const {
  if (sequence == sequence_) return absl::OkStatus();
  return SequenceMismatch(sequence_, sequence);
}

absl::StatusOr<CallLedger::Change> CallLedger::CheckChange(uint64_t sequence,
                                                           const std::string& digest) const {
  if (sequence == sequence_) return Change::kNew;
  if (sequence_ == 0 || sequence != sequence_ - 1) return StepOutOfOrder(sequence_, sequence);
  if (digest != last_digest_) return StepConflict(sequence);
  return Change::kSeen;
}

absl::Status CallLedger::CheckGradient(uint64_t micro_batches) const {
  if (micro_batches == added_.size()) return absl::OkStatus();
  return GradientIncomplete(added_.size(), micro_batches);
}

void CallLedger::Changed(std::string digest, std::string reply) {
  ++sequence_;
  added_.clear();
  last_digest_ = std::move(digest);
  last_reply_ = std::move(reply);
}

void CallLedger::Restore(uint64_t sequence, std::string digest, std::string reply) {
  sequence_ = sequence;
  last_digest_ = std::move(digest);
  last_reply_ = std::move(reply);
}

absl::StatusOr<CallLedger::Place> CallLedger::PlaceOf(uint64_t micro_batch,
                                                      const std::string& digest) const {
  if (micro_batch == added_.size()) return Place::kNext;
  if (micro_batch > added_.size()) return Place::kEarly;
  if (added_[micro_batch] != digest) return MicroBatchConflict(micro_batch);
  return Place::kAdded;
}

void CallLedger::Added(std::string digest) { added_.push_back(std::move(digest)); }

}  // namespace attnd
