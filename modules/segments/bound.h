// How long a segment takes at least: the slower of its arithmetic at the tensor cores' rate and of
// its bytes at nine tenths of the memory's, and what its launches cost. Tensors are read once and
// written once, attention aside, which always stands alone: its own time is not counted.
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "modules/layer_schedule.h"
#include "modules/segments/segment.h"

namespace attnd {

struct GpuRates {
  const char* name;          // "h100"
  const char* architecture;  // "sm_90"
  double flops_per_second;   // of 16-bit products
  double bytes_per_second;
};
// Rates of data sheets, oldest first.
absl::Span<const GpuRates> KnownGpus();
const GpuRates* GpuNamed(absl::string_view name);  // null: not known
// Takes the last known GPU that is not newer.
const GpuRates& GpuOfArchitecture(absl::string_view architecture);
// Whether products of this element are made in wide tiles, which may pass through a curve.
bool JoinsProducts(const GpuRates& gpu, ElementType element);

inline constexpr double kLaunchMicroseconds = 1.5;

struct SegmentWork {
  double flops = 0, bytes = 0;
  int64_t launches = 0;
  double Microseconds(const GpuRates& gpu) const;
  void operator+=(const SegmentWork& other);
};

// Counts the work of segments of one block in one direction.
class BlockWork {
 public:
  // The graph outlives the object.
  BlockWork(const ModuleGraph& graph, int64_t block, Direction direction, const RowCounts& rows);
  SegmentWork Of(const OpSegment& segment) const;

 private:
  friend class SegmentTraffic;
  const ModuleGraph& graph_;
  const int64_t block_;
  const Direction direction_;
  const RowCounts rows_;
  const std::vector<ModuleOp>& ops_;
  const OpOrder order_;
  const std::vector<int64_t> last_, holders_;  // [ops + 2]: LastUses, GradientHolders
};

}  // namespace attnd
