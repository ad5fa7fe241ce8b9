// ModuleEngine and ModuleInstance: what computes modules on one device or several. A server's path
// of a call is
//     Plan (what to reserve) → Make (takes it all) → Put … → Forward → Backward → Step → Get …
// and an engine knows nothing of names, owners, sequence numbers, retries or durability: those are
// the server's.
//
// Memory   Make takes all memory that an instance ever uses, zeroed, and the destructor gives it
//          back. Kept activations take rows of `limits.kept_rows` until they are dropped.
// Threads  an engine: any. An instance: one call at a time, from any thread.
// Results  bitwise the same for the same weights and calls, however sequences are batched, whatever
//          is kept or computed again, however many threads there are (proto/attnd/v1/module.proto).
// Errors   Plan and Make say INVALID_ARGUMENT, OUT_OF_RANGE (does not fit `budget`), UNIMPLEMENTED
//          (naming the field) or RESOURCE_EXHAUSTED (the device has no such memory). A call says
//          UNAVAILABLE where activations have no room, NOT_FOUND for an activation that was
//          dropped, CANCELLED, what attention says of its masks, else INTERNAL. Wrong sizes of
//          spans are bugs: CHECK. Rows have passed CheckRows and fit the limits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "modules/call_rows.h"
#include "modules/graph.h"
#include "modules/optimizer.h"
#include "modules/plan.h"
#include "modules/weight_table.h"

namespace attnd {

// Describes a module: checked (ModuleGraph::Make, CheckOptimizer), immutable, shared by who
// registers it and its instance. Neither moved nor copied.
struct ModuleDescription {
  ModuleDescription(ModuleGraph of, OptimizerSpec by)
      : graph(std::move(of)), table(graph), optimizer(std::move(by)) {}
  ModuleDescription(const ModuleDescription&) = delete;
  ModuleDescription& operator=(const ModuleDescription&) = delete;

  const ModuleGraph graph;
  const WeightTable table;
  const OptimizerSpec optimizer;
};

// Limits the bytes that an instance may take, on all devices together and on each. An engine of one
// device has device 0.
struct MemoryBudget {
  MemoryBudget(int64_t all) : bytes(all) {}  // NOLINT(google-explicit-constructor): of any device
  MemoryBudget(int64_t all, std::vector<int64_t> of_each)
      : bytes(all), devices(std::move(of_each)) {}
  int64_t OnDevice(size_t device) const {
    return devices.empty() ? bytes : std::min(bytes, devices[device]);
  }

  int64_t bytes = 0;
  std::vector<int64_t> devices;  // empty: `bytes` on each
};

// A plan, and what the engine's own kernels take beside it: packed weights, gathered heads.
struct EnginePlan {
  ModulePlan plan;
  int64_t engine_bytes = 0;
  int device = 0;                  // of engines that have several
  std::vector<EnginePlan> ranges;  // of consecutive layers, in order; empty: all on `device`

  int64_t bytes() const { return plan.bytes() + engine_bytes; }
  // The parts that lie on one device each.
  absl::Span<const EnginePlan> parts() const {
    return ranges.empty() ? absl::Span<const EnginePlan>(this, 1) : absl::MakeConstSpan(ranges);
  }
  // The rest, if any, is the host's, for what passes between ranges.
  int64_t device_bytes() const {
    int64_t sum = 0;
    for (const EnginePlan& part : parts()) sum += part.bytes();
    return sum;
  }
};

// The tensors of one entry of the table. Weights are of ModuleLayout::parameter_element, the others
// float32 and of trained entries alone, moments as far as the optimizer has them: SGD with momentum
// the first, AdamW two, AMSGrad three.
enum class TensorRole : uint8_t { kWeight, kGradient, kMoment1, kMoment2, kMoment2Max };

// 0 is no activation. Never given twice by an instance.
using ActivationId = uint64_t;

// Others that want the devices of a call while it computes. Looked at between ops, gradients being
// added or not: a call is cut into turns, and its bits stay.
class DeviceYield {
 public:
  virtual ~DeviceYield() = default;
  virtual bool IsWanted() const = 0;
  // Nothing of the call computes meanwhile. Returns when it may go on.
  virtual void Yield() = 0;
};

// Seconds that calls spent on moving tensors to a device and back; on a CPU none.
struct TransferSeconds {
  double upload = 0, download = 0;
};

struct ModuleForwardCall {
  const CallRows* rows = nullptr;
  CallDropout dropout;
  absl::Span<const std::byte> x;         // [rows, width] of the graph's BorderElement
  absl::Span<const std::byte> memory;    // [memory rows, memory_width]; empty without
  absl::Span<const uint8_t> mask_bits;   // iff rows->bool_mask
  bool keep = false;                     // for Backward; then dropout.is_training counts there too
  LayerRange layers = {};                // x is the first one's input, y the last one's output
  absl::Span<std::byte> y;               // as x; may lie where x does
  std::stop_token stop;                  // looked at between ops
  DeviceYield* yield = nullptr;          // null: nobody else wants the devices
  TransferSeconds* transfers = nullptr;  // added to; null: nobody asks
};

// A Backward of the layers that the Forward ran.
struct ModuleBackwardCall {
  ActivationId activation = 0;     // stays until DropActivation
  absl::Span<const std::byte> dy;  // as y
  bool add_gradients = true;       // of parameters; false: a retry, or frozen weights
  absl::Span<std::byte> dx;        // as x; may be empty, or lie where dy does
  absl::Span<std::byte> d_memory;  // as memory; may be empty
  bool add_d_memory = false;       // to what d_memory holds: the gradient by the layers behind
  // Looked at between ops where gradients are not added; else before the first op alone, so that
  // gradients hold a call whole or not at all.
  std::stop_token stop;
  DeviceYield* yield = nullptr;  // as Forward's
  TransferSeconds* transfers = nullptr;
};

// Replicas of a module, in as many processes: each adds up all of their gradients. The group is one
// that NewGroup of replica 0 has made; it is of no more use once a call has failed.
struct ReplicaCall {
  std::string group;
  int replica = 0, replicas = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::stop_token stop;
};

struct GradientStats {
  double squared_norm = 0;  // of gradients as they are, before any multiplier
  bool is_finite = true;
};

struct StepCall {
  absl::Span<const GroupRates> groups;  // one for each group that an entry is in
  double multiplier = 1;                // of gradients
  double max_norm = 0;                  // 0: not clipped
  bool skip_unless_finite = false;
  // Instead of groups, multiplier and max_norm: one for each entry, and what they refer to.
  absl::Span<const ParameterStep> parameters;
  absl::Span<const StepValues> values;
  std::optional<GradientStats> stats;  // of a module of which this one is a slice; absent: its own
};

struct StepResult {
  bool applied = false;
  GradientStats stats;
  int64_t optimizer_step = 0;  // steps that were applied, this one included
};

class ModuleInstance {
 public:
  virtual ~ModuleInstance() = default;

  virtual const ModuleDescription& description() const = 0;
  virtual const EnginePlan& plan() const = 0;

  // One tensor, whole, converted from or to `element`. `entry` counts as the table does. NOT_FOUND
  // "moment1" where the entry has none. Weights that were put count from the next Forward on.
  virtual absl::Status Put(int64_t entry, TensorRole role, ElementType element,
                           absl::Span<const std::byte> bytes) = 0;
  virtual absl::Status Get(int64_t entry, TensorRole role, ElementType element,
                           absl::Span<std::byte> bytes) const = 0;

  // The activation, 0 unless it keeps one.
  virtual absl::StatusOr<ActivationId> Forward(const ModuleForwardCall& call) = 0;
  virtual absl::Status Backward(const ModuleBackwardCall& call) = 0;
  virtual void DropActivation(ActivationId activation) = 0;  // of an unknown one: nothing
  // Rows of all activations; those of a part of the layers count in proportion.
  virtual int64_t KeptRows() const = 0;

  // The squared norm of each entry's gradient, as SquaredNorm; 0 where the entry is frozen.
  // [entries]
  virtual absl::Status SquaredNorms(absl::Span<double> norms) = 0;
  // Their sum, in the table's order.
  absl::StatusOr<GradientStats> Stats();
  // Applies what the gradients hold, or skips it, and clears them either way.
  virtual absl::StatusOr<StepResult> Step(const StepCall& call) = 0;
  virtual absl::Status ClearGradients() = 0;

  // ---- Replicas, where the engine's ReplicaVersion is not 0.
  // Device memory that PrepareReplicas takes, beside the plan's.
  virtual int64_t ReplicaBytes(int replicas) const;
  virtual absl::Status PrepareReplicas(int replicas);
  virtual absl::StatusOr<std::string> NewGroup();
  // Leaves ((S0 + S1) + S2) + ... in float32, of the gradients Sn of replica n, in that memory.
  // All replicas call it at once. Gradients stay as they are, also where it fails, as with
  // DEADLINE_EXCEEDED or CANCELLED.
  virtual absl::Status SumReplicas(const ReplicaCall& call);
  // The gradients become these sums. After an error they are arbitrary.
  virtual absl::Status TakeSums();
  // Leaves the group and gives the memory back.
  virtual void EndReplicas() {}

  // t of the optimizer: applied steps. Set when moments are put.
  virtual int64_t optimizer_step() const = 0;
  virtual void SetOptimizerStep(int64_t step) = 0;
};

// Counts what engines that measure how layers run best have measured since the start.
struct SearchTotals {
  int64_t kept_blocks = 0, searched_blocks = 0;  // found before and kept; measured
  int64_t samples = 0;
  double seconds = 0;
};

class ModuleEngine {
 public:
  virtual ~ModuleEngine() = default;
  virtual std::string Name() const = 0;  // "cpu", "reference"
  virtual absl::Status Supports(const ModuleGraph& graph) const = 0;
  // The version of what connects replicas of such a plan's instances, which has to be the same for
  // all of them. 0: they cannot be connected.
  virtual int ReplicaVersion(const EnginePlan& plan) const {
    static_cast<void>(plan);
    return 0;
  }
  // Whole bytes of an instance within `budget`, as MakePlan. Takes no memory.
  virtual absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module,
                                          const ModuleLimits& limits,
                                          const MemoryBudget& budget) const = 0;
  // `plan` is Plan's of the same module and limits. The engine outlives the instance.
  virtual absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) = 0;
  virtual SearchTotals Searches() const { return {}; }
};

}  // namespace attnd
