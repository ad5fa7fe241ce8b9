// NaiveBackend: attention in float32, one row at a time, as a person would first write it. It
// proves the conformance table twice. Without a mistake it must pass, so the error bounds leave
// room for an honest engine in float32, or one that rounds P and dS to 16 bits for its matrix
// units. With any one Mistake it must fail, so the table would notice that mistake in an engine.
#pragma once

#include "kernels/backend.h"

namespace attnd {

enum class Mistake {
  kNone,
  // Masks.
  kSwappedAlignment,  // top_left for bottom_right and the reverse
  kCausalOffByOne,    // row i sees key i + offset + 1
  kWindowRightOffByOne,
  kWindowLeftOffByOne,
  kMaskOffByOne,       // the bool mask's bit of the next key
  kKeyLengthIgnored,   // padding keys attend
  kOneOffsetForAll,    // the first batch entry's offset
  kNeighbourSequence,  // a packed sequence sees the next one's first key
  // Masks by description.
  kMaskForgotten,
  kMaskTransposed,
  kMaskNeighbourKey,      // what the mask says of the next key
  kMaskOfFirstHead,       // one pattern for all heads
  kMaskOfKvHead,          // a group's heads share its first pattern
  kMaskOfFirstEntry,      // one pattern for all batch entries
  kMaskOfEntryNumber,     // the batch entry's number picks the head's pattern
  kMaskWithoutAlignment,  // expressions stay where they are
  kMaskListsMoved,        // lists follow the alignment
  kMaskOfFirstOffset,     // all batch entries share the plan of the first one's offset
  kMaskRemainder,         // C's % for the floor modulus
  kMaskOriginIgnored,
  kMaskOriginSwapped,  // rows moved by keys and the reverse
  // Softmax.
  kMaxForLse,          // lse is the row maximum (SparkAttention, section 3.3)
  kScaleAfterSoftmax,  // softmax(S)·scale (SparkAttention, equation 1)
  kNoRescale,          // the online softmax keeps O when the maximum moves
  kHalfScores,         // scores rounded to float16 before softmax
  kZeroRestIgnored,
  kPaddingIsRest,  // keys beyond the lengths count as logit 0
  kSinkNotInLse,
  kUniformEmptyRow,  // a row without keys averages the values
  kNanLeak,          // masked values are multiplied by 0
  kNanSwallowed,     // NaN becomes 0
  kDropoutUnscaled,
  kShardIgnored,
  kWrongKvHead,  // query head h uses key head h mod kv_heads
  kBiasBeforeSoftcap,
  kAlibiOneSided,  // slope·(i + offset − j) without the absolute value
  // Backward.
  kUnscaledDk,  // SparkAttention, equation 4
  kDropoutNotReplayed,
  kNoSoftcapSlope,
  kLseGradientIgnored,
  kDeltaIgnored,
  kOwnLse,                   // lse is computed again instead of taken
  kGroupOverwritten,         // dK of a group is its last head's
  kBiasGradientOverwritten,  // dbias is the last score's
  kBiasGradientOrder,        // dbias is added head by head over all batch entries
  // Behaviour.
  kUnwrittenEmptyRow,
  kWritesBehindEnd,
  kDependsOnBatch,
  kMistakeCount,
};

class NaiveBackend : public Backend {
 public:
  // `rounds_operands`: P and dS are rounded to the element type before they are multiplied.
  explicit NaiveBackend(Mistake mistake = Mistake::kNone, bool rounds_operands = false);
  const BackendInfo& info() const override { return info_; }
  absl::Status Supports(const Problem& problem, Direction direction) const override;
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override;
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override;
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override;

 private:
  Mistake mistake_;
  bool rounds_operands_;
  BackendInfo info_;
};

}  // namespace attnd
