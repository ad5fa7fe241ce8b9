// CallParts: how a call that arrives in chunks can be computed piece by piece: its batch entries
// or, of one entry or of packed sequences whose heads come first, its KV-head groups. Each range of
// parts is a problem of its own (attention/shard.h) whose tensors lie, in one piece and aligned as
// an engine wants them, within the call's; its results are bitwise the whole call's.
//
// A call is one part when its tensors are interleaved or its parts unaligned, and when it wants the
// gradient of a bias, which is a sum over parts.
// A value; the Problem outlives it. Any thread.
#pragma once

#include <array>
#include <cstdint>

#include "attention/problem.h"
#include "attention/shard.h"
#include "server/call.h"
#include "server/staged_tensors.h"

namespace attnd {

class CallParts {
 public:
  // What an engine computes of a call: a problem and where its tensors lie.
  struct Part {
    Problem problem;
    TensorPlaces places;
  };

  explicit CallParts(const AttentionCall& call);

  int64_t count() const { return count_; }
  // Of the call's work, that of parts [begin, end).
  double Share(int64_t begin, int64_t end) const {
    return static_cast<double>(end - begin) / static_cast<double>(count_);
  }
  // How many parts are whole when of the payload that comes last, `last`, so many bytes have come.
  int64_t Complete(Tensor last, int64_t bytes) const;
  // Parts [begin, end) of a call whose tensors lie at `whole`.
  Part Of(int64_t begin, int64_t end, const TensorPlaces& whole) const;

 private:
  enum class Along : uint8_t { kNothing, kEntries, kHeads };

  ShardRange RangeOf(int64_t begin, int64_t end) const;
  // False when their tensors do not lie as an engine wants them.
  bool FindSteps();

  const Problem* problem_;
  Along along_ = Along::kNothing;
  int64_t count_ = 1;
  std::array<int64_t, kTensors> step_ = {};  // bytes from part to part; 0: all parts share it
};

}  // namespace attnd
