// InstanceProbe: runs segments of an instance's layers for who measures them, on the instance's own
// memory, filled with normal numbers (a GPU that multiplies zeros draws less power, and is faster).
// Attention is left out, since it is the same whatever is chosen: what would be launched before a
// forward's is. Before the instance's first call: Clear leaves memory as Make did.
// One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/layers/executor/executor_instance.h"
#include "modules/segments/segment.h"

namespace attnd {

class InstanceProbe {
 public:
  // Fills memory. The instance outlives the object.
  static absl::StatusOr<std::unique_ptr<InstanceProbe>> Make(ExecutorInstance& instance);

  const ModuleGraph& graph() const { return instance_.module_->graph; }
  // Whether the instance has a backward.
  bool trains() const { return instance_.limits_.kept_rows > 0; }
  int64_t rows() const { return kept_.call.rows.rows(); }  // that each run has

  // These segments of the first layer of `block`, in the order of forward, so many times one after
  // the other, and waits for them.
  absl::Status Run(int64_t block, Direction direction, absl::Span<const OpSegment> segments,
                   int times) const;
  absl::Status Clear() const;

 private:
  explicit InstanceProbe(ExecutorInstance& instance);
  absl::Status Fill() const;
  bool IsAttention(int64_t layer, const OpSegment& segment) const;
  absl::Status RunForward(int64_t layer, const OpSegment& segment) const;
  absl::Status RunBackward(int64_t layer, const OpSegment& segment) const;
  const ExecutorInstance::Kept* KeptOrNull() const { return trains() ? &kept_ : nullptr; }

  ExecutorInstance& instance_;
  ExecutorInstance::Kept kept_;
};

}  // namespace attnd
