// Batcher: holds admitted calls and closes a batch each time a device slot is free. Pure and not
// thread-safe: DeviceWorker drives it under its own lock.
//
// Order: deficit round robin (Shreedhar and Varghese, 1995) over flows; a flow is one caller at one
// priority, its weight 1, 4 or 16 for low, normal, high, its cost the estimated seconds (flops and
// bytes together). Within a flow the call that is due first and can still meet its deadline is
// next; one that cannot any more runs when the flow has no other. The flow at the front leads a
// batch; calls of the same BatchKey join in the same order while the batch stays within its
// limits, and their flows pay for them.
// Invariants: (1) a batch has at most max_calls calls and, unless it is a single call, at most
// max_bytes and max_seconds; (2) Take returns a batch while a call waits; (3) calls of one flow and
// one key leave as they are due, those of one time as they came; (4) a flow waits at most for the
// others' shares: a large call delays its own flow's next call, not the others'.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/admission/admission.h"
#include "server/call/call.h"

namespace attnd {

// Calls that agree on this may share a launch.
struct BatchKey {
  Direction direction;
  ElementType element;
  int16_t qk_head_dim, v_head_dim;
  bool bounded, bool_mask, mask, bias, alibi, dropout, softcap;
  DenominatorKind denominator;
  AccumulateType accumulate;
  bool packed, nondeterministic;

  static BatchKey Of(const AttentionCall& call);
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

// Admitted calls that share one launch. Closed: no call joins. Made only by Batcher.
class Batch {
 public:
  Batch(Batch&&) = default;
  Batch& operator=(Batch&&) = default;

  Direction direction() const { return direction_; }
  std::vector<AdmittedCall>& calls() { return calls_; }
  const std::vector<AdmittedCall>& calls() const { return calls_; }

 private:
  friend class Batcher;
  explicit Batch(Direction direction) : direction_(direction) {}
  Direction direction_;
  std::vector<AdmittedCall> calls_;
};

struct BatcherLimits {
  int max_calls = 64;
  int64_t max_bytes = int64_t{16} << 20;
  double max_seconds = 0.02;
};

class Batcher {
 public:
  // Fewer calls are not worth a launch of their own while another one begins.
  static constexpr int kMinCallsToShare = 4;

  explicit Batcher(const BatcherLimits& limits) : limits_(limits) {}

  void Add(AdmittedCall call);
  // `now` tells which deadlines can still be met. With several free `slots` a batch leaves the
  // others their share of the calls, but takes at least kMinCallsToShare.
  std::optional<Batch> Take(absl::Time now, int slots = 1);
  // Takes a waiting call out, when it is cancelled.
  std::optional<AdmittedCall> Remove(uint64_t id);

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  using Calls = std::deque<AdmittedCall>;  // in the order of their places
  struct Flow {
    std::string caller;
    Priority priority;
    double credit = 0;  // seconds it may still use; below 0 it has joined others' batches
    Calls calls;
  };
  using Flows = std::list<Flow>;  // in the order of their turns

  Flow& FlowOf(const AdmittedCall& call);
  static const AdmittedCall& Next(const Flow& flow, absl::Time now);
  Flows::iterator NextFlow(absl::Time now);
  void Fill(Batch& batch, const AdmittedCall& leader, absl::Time now, int max_calls);
  void DropEmptyFlows();

  const BatcherLimits limits_;
  Flows flows_;
  size_t size_ = 0;
};

}  // namespace attnd
