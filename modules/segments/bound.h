// How long a segment takes at least: the slower of its arithmetic at the tensor cores' rate and of
// its bytes at nine tenths of the memory's, and what its launches cost. Tensors are read once and
// written once, attention aside, which always stands alone: its own time is not counted. A V100's
// products take what their tiles were simulated to take.
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

// The products of a linear layer: its output, the gradients of its input and of its weights.
enum class LinearProduct : uint8_t { kOutput, kInputGradient, kWeightGradient };
inline constexpr int kLinearProducts = 3;

// Cycles that a multiprocessor needs for a product's blocks of 128 × 128 numbers, by LinearProduct:
// for 32 of the depth and for a block besides, where it has one block and where it has two.
struct ProductCycles {
  struct OfBlock {
    double step, besides;
  };
  OfBlock alone[kLinearProducts], beside_another[kLinearProducts];
  int64_t multiprocessors;
  double cycles_per_second;
};

struct GpuRates {
  const char* name;          // "h100"
  const char* architecture;  // "sm_90"
  double flops_per_second;   // of 16-bit products
  double bytes_per_second;
  const ProductCycles* product_cycles = nullptr;  // null: products take flops_per_second
};
// Rates of data sheets, oldest first.
absl::Span<const GpuRates> KnownGpus();
const GpuRates* GpuNamed(absl::string_view name);  // null: not known
// Takes the last known GPU that is not newer.
const GpuRates& GpuOfArchitecture(absl::string_view architecture);
// Whether products of this element are made on tensor cores, which may have a curve behind them.
bool JoinsProducts(const GpuRates& gpu, ElementType element);

inline constexpr double kLaunchMicroseconds = 1.5;

struct SegmentWork {
  // C [rows, columns].
  struct Product {
    LinearProduct of;
    int64_t rows, columns, depth;
  };
  double flops = 0, bytes = 0;  // flops: of `products`
  // Those of `bytes` that move after products: what sums over columns read, in launches of their
  // own, and what a product's curve writes or reads, as its tiles are done.
  double later_bytes = 0;
  int64_t launches = 0;
  // Those of `later_bytes` and `launches` that are sums for biases, which a V100's gradients of
  // weights make on their way.
  double bias_bytes = 0;
  int64_t bias_launches = 0;
  std::vector<Product> products;
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
