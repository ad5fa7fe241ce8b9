// Result: the outputs of one computed call, in staging memory. Made only by Answer; Encode turns it
// into a Reply. ReplySink: receives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/admission/admission.h"
#include "server/call/call.h"
#include "server/keep/lease_table.h"

namespace attnd {

// When a call passed each stage boundary.
struct CallTimes {
  absl::Time received;      // the whole request had arrived; of a streamed call: its header
  absl::Time admitted;      // decoded and admitted
  absl::Time landed;        // its tensors lie in staging memory
  absl::Time taken;         // a device slot took its batch
  absl::Duration upload;    // from there to the device; before the kernel
  absl::Time kernel_begin;  // the engine was free
  absl::Time kernel_end;
  absl::Duration compute;  // the kernels' time, of a shared launch this call's part by its flops
  absl::Time downloaded;   // its results lie in staging memory
};

// Holds what a forward's capture gives.
struct CaptureResult {
  CapturedMap map;                 // without the map itself
  std::optional<double> distance;  // iff a previous map was named
  std::string token;               // of the kept map; empty: none
};

class Result {
 public:
  Result(Result&&) = default;
  Result& operator=(Result&&) = default;

  const AttentionCall& call() const { return call_; }
  const LaunchReport& report() const { return report_; }
  const CallTimes& times() const { return times_; }
  int batched_with() const { return batched_with_; }
  // The bytes of a tensor of the call, by its id; null for one that is no output.
  const std::byte* output(int id) const { return outputs_[id]; }

  // Set when the caller asked for the call's tensors to be kept, and they were.
  const std::optional<LeaseGrant>& lease() const { return lease_; }

  // Set when the caller asked for the attention map.
  const std::optional<CaptureResult>& captured() const { return captured_; }

  // Owns what outputs point into and pays for it: shared by the slices that send them, and by the
  // lease if there is one.
  const std::shared_ptr<const void>& memory() const { return memory_; }

 private:
  friend class Answer;
  explicit Result(AttentionCall call) : call_(std::move(call)) {}

  AttentionCall call_;
  LaunchReport report_;
  CallTimes times_;
  int batched_with_ = 1;
  TensorPlaces outputs_;
  std::shared_ptr<const void> memory_;
  std::optional<LeaseGrant> lease_;
  std::optional<CaptureResult> captured_;
};

// Called exactly once, from any thread; destroyed afterwards.
class ReplySink {
 public:
  virtual ~ReplySink() = default;
  virtual void OnResult(absl::StatusOr<Result> result) = 0;
};

}  // namespace attnd
