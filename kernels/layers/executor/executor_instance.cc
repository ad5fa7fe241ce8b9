#include "kernels/layers/executor/executor_instance.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/layers/executor/sequence_parts.h"
#include "modules/optimizer_step.h"
#include "modules/tensor_bytes.h"

namespace attnd {
namespace {

constexpr int64_t kFloatBytes = 4;

// The tensor from number `first` on; null stays null.
Tensor Behind(const Tensor& tensor, int64_t first) {
  if (tensor.data == nullptr) return tensor;
  return {static_cast<std::byte*>(tensor.data) + first * ElementBytes(tensor.element),
          tensor.element};
}

absl::Status Stopped(const std::stop_token& stop) {
  return stop.stop_requested() ? absl::CancelledError("stopped") : absl::OkStatus();
}

// Adds what a device's transfers take while it lives.
class TransferCount {
 public:
  TransferCount(const ModuleDevice& device, TransferSeconds* sum)
      : device_(device), sum_(sum), before_(device.transfers()) {}
  ~TransferCount() {
    if (sum_ == nullptr) return;
    const TransferSeconds now = device_.transfers();
    sum_->upload += now.upload - before_.upload;
    sum_->download += now.download - before_.download;
  }
  TransferCount(const TransferCount&) = delete;
  TransferCount& operator=(const TransferCount&) = delete;

 private:
  const ModuleDevice& device_;
  TransferSeconds* const sum_;
  const TransferSeconds before_;
};

}  // namespace

absl::StatusOr<EnginePlan> ExecutorInstance::Plan(const ModuleDescription& module,
                                                  const ModuleLimits& limits, int64_t budget,
                                                  const ModuleDevice& device) {
  // Recomputation saves memory but leaves the device's own bytes as they are, or nearly: plan for
  // what is left of the budget, until both fit.
  EnginePlan plan;
  for (int64_t left = budget;;) {
    ASSIGN_OR_RETURN(plan.plan,
                     MakePlan(module.graph, module.table, module.optimizer, limits, left));
    const InstanceLayout layout(module, limits, plan.plan, device);
    plan.engine_bytes = layout.bytes - plan.plan.bytes();
    if (plan.bytes() <= budget) return plan;
    left = std::min(left - 1, budget - plan.engine_bytes);
  }
}

absl::StatusOr<std::unique_ptr<ExecutorInstance>> ExecutorInstance::Make(
    std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
    const EnginePlan& plan, std::unique_ptr<ModuleDevice> device,
    const std::vector<BlockEnds>& segments) {
  ASSIGN_OR_RETURN(std::vector<BlockPlan> blocks, BlocksOf(module->graph, segments));
  const InstanceLayout layout(*module, limits, plan.plan, *device);
  ASSIGN_OR_RETURN(std::byte * memory, device->Allocate(layout.bytes));
  return std::unique_ptr<ExecutorInstance>(new ExecutorInstance(
      std::move(module), limits, plan, std::move(device), std::move(blocks), layout, memory));
}

absl::StatusOr<std::vector<ExecutorInstance::BlockPlan>> ExecutorInstance::BlocksOf(
    const ModuleGraph& graph, const std::vector<BlockEnds>& segments) {
  std::vector<BlockPlan> blocks;
  for (size_t block = 0; block < graph.layout().blocks.size(); ++block) {
    const BlockEnds ends = segments.empty() ? SingleOps(graph, block) : segments.at(block);
    blocks.push_back({.order = OrderOf(graph, block)});
    ASSIGN_OR_RETURN(blocks.back().scheme, SchemeOf(graph, block, ends));
  }
  return blocks;
}

absl::Status ExecutorInstance::Cut(const std::vector<BlockEnds>& segments) {
  ASSIGN_OR_RETURN(blocks_, BlocksOf(module_->graph, segments));
  return absl::OkStatus();
}

ExecutorInstance::ExecutorInstance(std::shared_ptr<const ModuleDescription> module,
                                   const ModuleLimits& limits, const EnginePlan& plan,
                                   std::unique_ptr<ModuleDevice> device,
                                   std::vector<BlockPlan> blocks, const InstanceLayout& layout,
                                   std::byte* memory)
    : module_(std::move(module)),
      limits_(limits),
      plan_(plan),
      blocks_(std::move(blocks)),
      layout_(layout),
      device_(std::move(device)),
      tensors_(*module_, layout_, memory, *device_) {
  const ModuleGraph& graph = module_->graph;
  const RowCounts rows = {limits.max_rows, limits.max_memory_rows};
  for (size_t block = 0; block < graph.layout().blocks.size(); ++block) {
    schedules_.forward.emplace_back(ForwardBuffers(graph, block, rows));
  }
  if (limits.kept_rows == 0) return;
  for (int64_t layer = 0; layer < Layers(); ++layer) {
    schedules_.backward.emplace_back(BackwardBuffers(graph, graph.layout().layers[layer].block,
                                                     plan_.plan.recompute[layer], rows));
  }
  free_.emplace(layout_.activation_bytes);
}

// ---- Tensors.

void* ExecutorInstance::Place(int64_t entry, TensorRole role) const {
  const WeightEntry& of = module_->table.entries()[entry];
  if (role == TensorRole::kWeight) return tensors_.Weight(of).data;
  if (role == TensorRole::kGradient) return tensors_.gradients() + *of.trained_offset;
  const int moment = static_cast<int>(role) - static_cast<int>(TensorRole::kMoment1);
  return tensors_.moments(moment) + *of.trained_offset;
}

absl::StatusOr<ElementType> ExecutorInstance::ElementOf(int64_t entry, TensorRole role) const {
  ASSIGN_OR_RETURN(const ElementType element, ElementOfRole(*module_, entry, role));
  if (role == TensorRole::kWeight || limits_.kept_rows > 0) return element;
  return absl::NotFoundError(
      "limits.kept_rows is 0: the module is not trained; register it with kept_rows");
}

absl::Status ExecutorInstance::Put(int64_t entry, TensorRole role, ElementType element,
                                   absl::Span<const std::byte> bytes) {
  ASSIGN_OR_RETURN(const ElementType kept, ElementOf(entry, role));
  const int64_t count = module_->table.entries()[entry].elements;
  CHECK(static_cast<int64_t>(bytes.size()) == count * ElementBytes(element));
  RETURN_IF_ERROR(device_->Put(element, bytes.data(), {Place(entry, role), kept}, count));
  if (role == TensorRole::kGradient) norms_.clear();
  if (role == TensorRole::kWeight) Pack(entry);
  return device_->Finish();
}

absl::Status ExecutorInstance::Get(int64_t entry, TensorRole role, ElementType element,
                                   absl::Span<std::byte> bytes) const {
  ASSIGN_OR_RETURN(const ElementType kept, ElementOf(entry, role));
  const int64_t count = module_->table.entries()[entry].elements;
  CHECK(static_cast<int64_t>(bytes.size()) == count * ElementBytes(element));
  RETURN_IF_ERROR(device_->Get({Place(entry, role), kept}, element, bytes.data(), count));
  return device_->Finish();
}

void ExecutorInstance::Pack(int64_t entry) {
  const WeightEntry& of = module_->table.entries()[entry];
  if (of.is_matrix()) device_->Pack(tensors_.Matrix(of));
}

// ---- Activations.

absl::StatusOr<std::unique_ptr<ExecutorInstance::Kept>> ExecutorInstance::Reserve(
    const CallRows& rows, LayerRange layers) {
  auto kept = std::make_unique<Kept>(module_->graph, plan_.plan.recompute, rows, layers);
  int64_t memory_rows = rows.memory_rows();
  for (const auto& [id, other] : kept_) memory_rows += other->call.rows.memory_rows();
  const bool has_room =
      KeptLayerRows() + rows.rows() * layers.size() <= limits_.kept_rows * Layers() &&
      memory_rows <= limits_.kept_memory_rows;
  std::optional<int64_t> at;
  if (free_.has_value() && has_room) {
    at = free_->Take(std::max(kept->places.bytes, kTensorAlignment));
  }
  if (!at.has_value()) {
    return absl::UnavailableError(absl::StrCat("activations: no room for ", rows.rows(),
                                               " rows beside ", KeptRows(), " of ",
                                               limits_.kept_rows));
  }
  kept->at = *at;
  return kept;
}

void ExecutorInstance::DropActivation(ActivationId activation) {
  const auto found = kept_.find(activation);
  if (found == kept_.end()) return;
  free_->Give(found->second->at, std::max(found->second->places.bytes, kTensorAlignment));
  kept_.erase(found);
}

int64_t ExecutorInstance::KeptLayerRows() const {
  int64_t rows = 0;
  for (const auto& [id, kept] : kept_) rows += kept->rows();
  return rows;
}

int64_t ExecutorInstance::KeptRows() const { return (KeptLayerRows() + Layers() - 1) / Layers(); }

std::byte* ExecutorInstance::KeptAt(const Kept& kept, int64_t offset) const {
  return tensors_.activations() + kept.at + offset;
}

// ---- Forward.

Tensor ExecutorInstance::InputOf(int64_t layer, const Kept* kept) const {
  const ModuleLayout& layout = module_->graph.layout();
  if (layer == Layers()) {
    const bool is_wide = module_->graph.BlockOf(layer - 1).ops.back().wide;
    return {tensors_.boundary(layer % 2), is_wide ? layout.wide_element : layout.element};
  }
  const ElementType element = module_->graph.ElementOf(layer, kInputValue);
  if (kept == nullptr) return {tensors_.boundary(layer % 2), element};
  return {KeptAt(*kept, kept->places.layers[layer].values[kInputValue]), element};
}

// Ends a call that was stopped, and lets others have the device.
absl::Status ExecutorInstance::BeforeOp(const InstanceCall& call) {
  RETURN_IF_ERROR(Stopped(call.stop));
  if (call.yield == nullptr || !call.yield->IsWanted()) return absl::OkStatus();
  RETURN_IF_ERROR(device_->Finish());
  call.yield->Yield();
  return absl::OkStatus();
}

LayerValues ExecutorInstance::ForwardValues(int64_t layer, const InstanceCall& part,
                                            int64_t first_row, const Kept* kept) const {
  const ModuleGraph& graph = module_->graph;
  const BlockShapes& shapes = graph.ShapesOf(layer);
  const int64_t ops = static_cast<int64_t>(graph.BlockOf(layer).ops.size());
  const BufferPlaces& places = schedules_.forward[graph.layout().layers[layer].block];
  LayerValues values;
  if (kept != nullptr) values = KeptValuesOf(layer, *kept);
  values.values.resize(ops + kFirstOpValue);
  values.lse.resize(ops);
  values.values[kInputValue] = InputOf(layer, kept);
  for (size_t value = 0; value < values.values.size(); ++value) {
    values.values[value] = Behind(values.values[value], first_row * shapes.values[value].columns);
  }
  for (int64_t op : shapes.attention_ops) {
    float*& lse = values.lse[op];
    if (lse == nullptr) continue;
    lse += first_row * std::get<AttentionOp>(graph.BlockOf(layer).ops[op].kind).q.heads;
  }
  values.values[kMemoryValue] = {const_cast<void*>(part.memory.data), part.memory.element};
  for (int64_t value = kFirstOpValue; value + 1 < ops + kFirstOpValue; ++value) {
    if (values.values[value].data != nullptr) continue;
    const int64_t at = places.At(BufferUse::kValue, value);
    values.values[value] = {tensors_.layer_buffers() + at, graph.ElementOf(layer, value)};
  }
  return values;
}

absl::Status ExecutorInstance::ForwardLayer(int64_t layer, const InstanceCall& part,
                                            int64_t first_row, const Kept* kept, Tensor output) {
  const ModuleGraph& graph = module_->graph;
  const int64_t block = graph.layout().layers[layer].block;
  LayerValues values = ForwardValues(layer, part, first_row, kept);
  const Tensor last = values.values.back();  // null unless backward reads it
  values.values.back() = Behind(output, first_row * graph.layout().width);
  const LayerRun run(tensors_, part, layer, schedules_.forward[block], values);
  for (const OpSegment& segment : blocks_[block].scheme.forward) {
    RETURN_IF_ERROR(BeforeOp(part));
    RETURN_IF_ERROR(run.Forward(segment, blocks_[block].order, kept != nullptr));
  }
  if (last.data != nullptr) {
    device_->Copy(values.values.back().data, last.data,
                  part.rows.rows() * graph.layout().width * ElementBytes(last.element));
  }
  return absl::OkStatus();
}

absl::Status ExecutorInstance::BringMemory(const ModuleForwardCall& call, const Kept* kept,
                                           InstanceCall& of) {
  if (call.memory.empty()) return absl::OkStatus();
  std::byte* place = kept != nullptr ? KeptAt(*kept, kept->places.memory_at) : tensors_.memory();
  of.memory.data = place;
  const ElementType element = tensors_.element();
  return device_->Put(element, call.memory.data(), {place, element},
                      static_cast<int64_t>(call.memory.size()) / ElementBytes(element));
}

absl::StatusOr<ActivationId> ExecutorInstance::Forward(const ModuleForwardCall& call) {
  const TransferCount count(*device_, call.transfers);
  return ForwardLayers(call);
}

absl::StatusOr<ActivationId> ExecutorInstance::ForwardLayers(const ModuleForwardCall& call) {
  CheckSizes(*module_, call);
  CHECK(call.rows->rows() <= limits_.max_rows);
  CHECK(call.memory.empty() || call.rows->memory_rows() <= limits_.max_memory_rows);
  RETURN_IF_ERROR(Stopped(call.stop));
  const ModuleGraph& graph = module_->graph;
  const LayerRange layers = graph.Resolved(call.layers);
  std::unique_ptr<Kept> kept;
  if (call.keep) {
    ASSIGN_OR_RETURN(kept, Reserve(*call.rows, layers));
  }
  InstanceCall without;
  InstanceCall& of = kept != nullptr ? kept->call : without;
  of = {.rows = *call.rows,
        .dropout = call.dropout,
        .mask_bits = {call.mask_bits.begin(), call.mask_bits.end()},
        .positions = call.rows->ResolvedPositions(),
        .memory = {nullptr, tensors_.element()},
        .stop = call.stop,
        .yield = call.yield};
  absl::Status status = BringMemory(call, kept.get(), of);
  if (status.ok()) status = RunForward(call, of, layers, kept.get());
  const ActivationId id = kept != nullptr ? ++last_activation_ : 0;
  if (kept != nullptr) kept_.emplace(id, std::move(kept));
  if (!status.ok()) {
    device_->Finish().IgnoreError();  // the device may still read x
    DropActivation(id);
    return status;
  }
  return id;
}

absl::Status ExecutorInstance::RunForward(const ModuleForwardCall& call, const InstanceCall& of,
                                          LayerRange layers, const Kept* kept) {
  const ModuleGraph& graph = module_->graph;
  const int64_t width = graph.layout().width;
  const ElementType x_element = graph.BorderElement(layers.first);
  const ElementType y_element = graph.BorderElement(layers.end);
  const Tensor x = InputOf(layers.first, kept), y = InputOf(layers.end, nullptr);
  const std::vector<InstanceCall> cut = PartsOf(graph, of, layers, device_->PartBytes());
  const absl::Span<const InstanceCall> whole(&of, 1);
  const absl::Span<const InstanceCall> parts = cut.empty() ? whole : absl::MakeConstSpan(cut);
  for (int64_t layer = layers.first; layer < layers.end; ++layer) {
    const bool is_first = layer == layers.first, is_last = layer + 1 == layers.end;
    const Tensor output = is_last ? y : InputOf(layer + 1, kept);
    for (const InstanceCall& part : is_first || is_last ? parts : whole) {
      const int64_t first_row = part.rows.first_row - of.rows.first_row;
      const int64_t before = first_row * width, numbers = part.rows.rows() * width;
      if (is_first) {
        RETURN_IF_ERROR(device_->Put(x_element, call.x.data() + before * ElementBytes(x_element),
                                     Behind(x, before), numbers));
      }
      RETURN_IF_ERROR(ForwardLayer(layer, part, first_row, kept, output));
      if (is_last) {
        RETURN_IF_ERROR(Stopped(call.stop));
        RETURN_IF_ERROR(device_->Get(Behind(y, before), y_element,
                                     call.y.data() + before * ElementBytes(y_element), numbers));
      }
    }
  }
  return device_->Finish();
}

// ---- Backward.

LayerValues ExecutorInstance::KeptValuesOf(int64_t layer, const Kept& kept) const {
  const KeptPlaces::Layer& places = kept.places.layers[layer];
  LayerValues values;
  for (size_t value = 0; value < places.values.size(); ++value) {
    const int64_t at = places.values[value];
    values.values.push_back(
        {at < 0 ? nullptr : KeptAt(kept, at), module_->graph.ElementOf(layer, value)});
  }
  for (int64_t at : places.lse) {
    values.lse.push_back(at < 0 ? nullptr : reinterpret_cast<float*>(KeptAt(kept, at)));
  }
  return values;
}

// Returns the gradient of the input of `layer`; with Layers() of the last one's output.
Tensor ExecutorInstance::GradientBoundary(int64_t layer) const { return InputOf(layer, nullptr); }

// The segment, or those of its ops whose values are wanted again.
absl::Status ExecutorInstance::ForwardAgain(const OpSegment& segment, const OpOrder& order,
                                            const std::vector<bool>& again, const LayerRun& run) {
  const auto begin = order.ops.begin() + segment.first, end = order.ops.begin() + segment.end;
  const auto is_wanted = [&again](int64_t op) { return again[op + kFirstOpValue]; };
  if (std::all_of(begin, end, is_wanted)) return run.Forward(segment, order, /*is_kept=*/true);
  for (auto op = begin; op != end; ++op) {
    if (is_wanted(*op)) RETURN_IF_ERROR(run.Forward(*op));
  }
  return absl::OkStatus();
}

ExecutorInstance::BackwardTensors ExecutorInstance::BackwardTensorsOf(int64_t layer,
                                                                      const Kept& kept) const {
  const ModuleGraph& graph = module_->graph;
  const int64_t block = graph.layout().layers[layer].block;
  const int64_t ops = static_cast<int64_t>(graph.BlockOf(layer).ops.size());
  const BufferPlaces& places = schedules_.backward[layer];
  BackwardTensors tensors = {.again = RecomputedValues(graph, block, plan_.plan.recompute[layer]),
                             .values = KeptValuesOf(layer, kept),
                             .gradients = {.values = std::vector<Tensor>(ops + kFirstOpValue),
                                           .is_set = std::vector<bool>(ops + kFirstOpValue)}};
  auto& [again, values, gradients] = tensors;
  values.values[kMemoryValue].data = const_cast<void*>(kept.call.memory.data);
  for (int64_t op = 0; op < ops; ++op) {
    const int64_t value = op + kFirstOpValue;
    const ElementType element = graph.ElementOf(layer, value);
    if (again[value]) {
      values.values[value] = {tensors_.layer_buffers() + places.At(BufferUse::kValue, value),
                              element};
      const int64_t lse = places.At(BufferUse::kLogSumExp, op);
      if (lse >= 0) values.lse[op] = reinterpret_cast<float*>(tensors_.layer_buffers() + lse);
    }
    const int64_t at = places.At(BufferUse::kGradient, value);
    if (at >= 0) gradients.values[value] = {tensors_.layer_buffers() + at, element};
  }
  gradients.values.back() = GradientBoundary(layer + 1);
  gradients.values[kInputValue] = GradientBoundary(layer);
  gradients.values[kMemoryValue] = {tensors_.d_memory(), tensors_.element()};
  const std::vector<int64_t> holders = GradientHolders(graph, block);
  for (int64_t value = kFirstOpValue; value < ops + kFirstOpValue; ++value) {
    if (holders[value] != value) gradients.values[value] = gradients.values[holders[value]];
  }
  gradients.is_set.back() = true;
  return tensors;
}

absl::Status ExecutorInstance::BackwardLayer(int64_t layer, const Kept& kept, bool adds,
                                             bool& memory_is_set) {
  auto [again, values, gradients] = BackwardTensorsOf(layer, kept);
  gradients.is_set[kMemoryValue] = memory_is_set;
  const LayerRun run(tensors_, kept.call, layer, schedules_.backward[layer], values);
  const auto& [order, scheme] = blocks_[module_->graph.layout().layers[layer].block];
  for (const OpSegment& segment : scheme.forward) {
    RETURN_IF_ERROR(BeforeOp(kept.call));
    RETURN_IF_ERROR(ForwardAgain(segment, order, again, run));
  }
  for (auto segment = scheme.backward.rbegin(); segment != scheme.backward.rend(); ++segment) {
    RETURN_IF_ERROR(BeforeOp(kept.call));
    RETURN_IF_ERROR(run.Backward(*segment, order, adds, gradients));
  }
  memory_is_set = gradients.is_set[kMemoryValue];
  return absl::OkStatus();
}

absl::Status ExecutorInstance::Backward(const ModuleBackwardCall& call) {
  const TransferCount count(*device_, call.transfers);
  const absl::Status status = BackwardLayers(call);
  if (!status.ok()) device_->Finish().IgnoreError();  // the device may still read dy
  return status;
}

absl::Status ExecutorInstance::BackwardLayers(const ModuleBackwardCall& call) {
  const auto found = kept_.find(call.activation);
  if (found == kept_.end()) return absl::NotFoundError("activation: dropped, or never kept");
  Kept& kept = *found->second;
  CheckSizes(*module_, kept.call.rows, kept.layers, call);
  RETURN_IF_ERROR(Stopped(call.stop));
  if (call.add_gradients) norms_.clear();
  kept.call.stop = call.add_gradients ? std::stop_token() : call.stop;
  kept.call.yield = call.yield;
  const ModuleGraph& graph = module_->graph;
  const auto [first, end] = kept.layers;
  const int64_t numbers = kept.call.rows.rows() * graph.layout().width;
  RETURN_IF_ERROR(
      device_->Put(graph.BorderElement(end), call.dy.data(), GradientBoundary(end), numbers));
  const ElementType element = tensors_.element();
  const Tensor d_memory{tensors_.d_memory(), element};
  const auto memory_bytes = static_cast<int64_t>(call.d_memory.size());
  bool memory_is_set = call.add_d_memory;
  if (memory_is_set) {
    RETURN_IF_ERROR(device_->Put(element, call.d_memory.data(), d_memory,
                                 memory_bytes / ElementBytes(element)));
  }
  for (int64_t layer = end - 1; layer >= first; --layer) {
    RETURN_IF_ERROR(BackwardLayer(layer, kept, call.add_gradients, memory_is_set));
  }
  RETURN_IF_ERROR(Stopped(kept.call.stop));
  if (!call.dx.empty()) {
    RETURN_IF_ERROR(
        device_->Get(GradientBoundary(first), graph.BorderElement(first), call.dx.data(), numbers));
  }
  if (!call.d_memory.empty()) {
    if (!memory_is_set) device_->SetZero(d_memory.data, memory_bytes);
    RETURN_IF_ERROR(device_->Get(d_memory, element, call.d_memory.data(),
                                 memory_bytes / ElementBytes(element)));
  }
  return device_->Finish();
}

// ---- Steps.

absl::Status ExecutorInstance::SquaredNorms(absl::Span<double> norms) {
  if (norms_.empty()) RETURN_IF_ERROR(ComputeNorms());
  std::copy(norms_.begin(), norms_.end(), norms.begin());
  return absl::OkStatus();
}

absl::Status ExecutorInstance::ComputeNorms() {
  const std::vector<WeightEntry>& entries = module_->table.entries();
  std::vector<double> norms(entries.size());
  std::vector<ModuleDevice::Gradients> ranges;
  std::vector<size_t> places;
  for (size_t n = 0; n < entries.size(); ++n) {
    if (limits_.kept_rows == 0 || !entries[n].trained_offset.has_value()) continue;
    ranges.push_back({tensors_.gradients() + *entries[n].trained_offset, entries[n].elements});
    places.push_back(n);
  }
  std::vector<double> found(ranges.size());
  if (!ranges.empty()) RETURN_IF_ERROR(device_->SquaredNorms(ranges, absl::MakeSpan(found)));
  for (size_t n = 0; n < found.size(); ++n) norms[places[n]] = found[n];
  norms_ = std::move(norms);
  return absl::OkStatus();
}

absl::StatusOr<StepResult> ExecutorInstance::Step(const StepCall& call) {
  StepResult result;
  if (call.stats.has_value()) {
    result.stats = *call.stats;
  } else {
    ASSIGN_OR_RETURN(result.stats, Stats());
  }
  result.applied = limits_.kept_rows > 0 && IsApplied(*module_, call, result.stats);
  bool clears_all = true;
  if (result.applied) {
    ++optimizer_step_;
    const OptimizerStep step(*module_, call, result.stats, optimizer_step_);
    OptimizerTensors tensors{.gradients = tensors_.gradients()};
    for (int64_t n = 0; n < module_->optimizer.MomentCount(); ++n) {
      tensors.moments[n] = tensors_.moments(n);
    }
    const std::vector<WeightEntry>& entries = module_->table.entries();
    if (!entries.empty()) {
      tensors.weights = static_cast<float*>(tensors_.Weight(entries[0]).data) - entries[0].offset;
    }
    std::vector<ModuleDevice::WeightStep> steps;
    int64_t stepped = 0;
    for (size_t n = 0; n < entries.size(); ++n) {
      if (step.Skips(n)) continue;
      steps.push_back({step.Of(n, tensors), tensors_.gradients() + *entries[n].trained_offset, {}});
      if (entries[n].is_matrix()) steps.back().matrix = tensors_.Matrix(entries[n]);
      stepped += entries[n].elements;
    }
    device_->Step(steps);
    // Those of what the call leaves as it is are cleared too.
    clears_all = stepped < module_->table.trained_elements();
  }
  result.optimizer_step = optimizer_step_;
  RETURN_IF_ERROR(clears_all ? ClearGradients() : device_->Finish());
  return result;
}

absl::Status ExecutorInstance::ClearGradients() {
  norms_.clear();
  if (limits_.kept_rows == 0) return absl::OkStatus();
  device_->SetZero(tensors_.gradients(), module_->table.trained_elements() * kFloatBytes);
  return device_->Finish();
}

// ---- Replicas: their gradients lie end to end, so that sums are those of one tensor.

int64_t ExecutorInstance::ReplicaBytes(int replicas) const {
  return device_->replica_sums()->Bytes(module_->table.trained_elements(), replicas);
}

absl::Status ExecutorInstance::PrepareReplicas(int replicas) {
  return device_->replica_sums()->Prepare(module_->table.trained_elements(), replicas);
}

absl::StatusOr<std::string> ExecutorInstance::NewGroup() {
  return device_->replica_sums()->NewGroup();
}

absl::Status ExecutorInstance::SumReplicas(const ReplicaCall& call) {
  RETURN_IF_ERROR(device_->Finish());
  return device_->replica_sums()->Sum(call, tensors_.gradients(),
                                      module_->table.trained_elements());
}

absl::Status ExecutorInstance::TakeSums() {
  norms_.clear();
  device_->Copy(device_->replica_sums()->sums(), tensors_.gradients(),
                module_->table.trained_elements() * kFloatBytes);
  return device_->Finish();
}

void ExecutorInstance::EndReplicas() {
  if (ReplicaSums* sums = device_->replica_sums(); sums != nullptr) sums->End();
}

}  // namespace attnd
