// CallLedger: which calls a module's state has seen, so that each counts once.
//
//   sequence      names the state. A change (Step, committed PutTensors) of sequence n makes n + 1.
//                 The same change again is answered with the first one's reply; another is refused.
//   micro-batch   of the accumulator of this sequence. Added in order, each once.
//
// Digests are of what a call says: two calls with one digest are one call, sent twice. A value; its
// owner's mutex guards it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd {

class CallLedger {
 public:
  uint64_t sequence() const { return sequence_; }
  // In the accumulator: [0, micro_batches).
  uint64_t micro_batches() const { return added_.size(); }

  // FAILED_PRECONDITION SEQUENCE_MISMATCH.
  absl::Status CheckSequence(uint64_t sequence) const;

  enum class Change { kNew, kSeen };
  // FAILED_PRECONDITION STEP_CONFLICT or STEP_OUT_OF_ORDER.
  absl::StatusOr<Change> CheckChange(uint64_t sequence, const std::string& digest) const;
  // FAILED_PRECONDITION GRADIENT_INCOMPLETE unless exactly so many are in the accumulator.
  absl::Status CheckGradient(uint64_t micro_batches) const;
  // The accumulator is empty again.
  void Changed(std::string digest, std::string reply);
  // As it was after the change of this digest and reply.
  void Restore(uint64_t sequence, std::string digest, std::string reply);
  const std::string& last_digest() const { return last_digest_; }
  const std::string& last_reply() const { return last_reply_; }  // of a change that was seen

  enum class Place { kNext, kEarly, kAdded };
  // FAILED_PRECONDITION MICRO_BATCH_CONFLICT.
  absl::StatusOr<Place> PlaceOf(uint64_t micro_batch, const std::string& digest) const;
  void Added(std::string digest);  // the next one

 private:
  uint64_t sequence_ = 0;
  std::vector<std::string> added_;  // digests
  std::string last_digest_, last_reply_;
};

}  // namespace attnd
