#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/cost.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/cuda/capture_plan.h"
#include "kernels/cuda/mask_choice.h"
#include "kernels/cuda/transfer.h"

namespace attnd::cuda {
namespace {

// Slices have like shares of the work, but its estimate may be wrong by this much.
constexpr double kSliceMargin = 1.25;
constexpr int kMaxSlices = 1 << 16;
constexpr double kMinLessonSeconds = 200e-6;  // below, a launch's fixed cost hides its rate
constexpr double kNewWeight = 0.3;            // of the last launch in the moving average

absl::Status SetZero(DeviceLaunch& launch, absl::Span<const DeviceRange> ranges) {
  for (const DeviceRange& range : ranges) {
    RETURN_IF_ERROR(launch.SetZero(range.address, range.bytes));
  }
  return absl::OkStatus();
}

// Calls that share kernels, by their names. Cancelled ones are left out.
template <class Kernels, class Call>
struct Group {
  Kernels kernels;
  std::vector<const Call*> calls;
};

const KernelRow& MainRow(const ForwardKernels& kernels) { return kernels.forward; }
const KernelRow& MainRow(const BackwardKernels& kernels) { return kernels.backward; }
template <class Kernels>
std::string MainName(const Kernels& kernels) {
  return absl::StrCat(NameOf(MainRow(kernels)), kernels.by_residue ? "_residue" : "");
}
std::string KeyOf(const ForwardKernels& kernels) { return MainName(kernels); }
std::string KeyOf(const BackwardKernels& kernels) {
  return absl::StrCat(MainName(kernels), kernels.sink_gradient ? "+sink" : "",
                      kernels.bias_gradient ? "+bias" : "");
}

template <class Kernels>
std::string ReportedName(const Kernels& kernels) {
  return absl::StrCat("cuda_", MainName(kernels));
}

// As they lie in memory, so that like calls lie at one distance from each other (CopyMerger).
bool LiesBefore(const ForwardCall* a, const ForwardCall* b) { return a->lse < b->lse; }
bool LiesBefore(const BackwardCall* a, const BackwardCall* b) { return a->d_k < b->d_k; }

template <class Kernels, class Call, class Select>
std::map<std::string, Group<Kernels, Call>> GroupCalls(absl::Span<const Call> calls,
                                                       const Select& select) {
  std::map<std::string, Group<Kernels, Call>> groups;
  for (const Call& call : calls) {
    if (call.stop.stop_requested()) continue;
    absl::StatusOr<Kernels> kernels = select(*call.problem);
    CHECK(kernels.ok()) << "a launch of what Supports refuses: " << kernels.status();
    Group<Kernels, Call>& group = groups[KeyOf(*kernels)];
    group.kernels = *kernels;
    group.calls.push_back(&call);
  }
  for (auto& [name, group] : groups) {
    std::sort(group.calls.begin(), group.calls.end(),
              [](const Call* a, const Call* b) { return LiesBefore(a, b); });
  }
  return groups;
}

// Kernels that differ run one launch after the other; the report names the first and sums times.
template <class Kernels, class Call, class Run>
absl::StatusOr<LaunchReport> RunGroups(const std::map<std::string, Group<Kernels, Call>>& groups,
                                       const Run& run) {
  LaunchReport report;
  for (const auto& [name, group] : groups) {
    ASSIGN_OR_RETURN(const DeviceTimes times, run(group.kernels, group.calls));
    report.seconds += times.kernel;
    report.upload_seconds += times.upload;
    report.download_seconds += times.download;
    const KernelRow& row = MainRow(group.kernels);
    if (report.kernel.empty()) report.kernel = ReportedName(group.kernels);
    if (row.half_accumulate) report.accumulate = AccumulateType::kFloat16;
    report.deterministic = report.deterministic && row.ordered;
  }
  return report;
}

// As the kernels see them; `own` has those of calls by classes.
template <class Call>
std::vector<const Problem*> ProblemsOf(absl::Span<const Call* const> calls,
                                       absl::Span<const CallMask> masks, std::deque<Problem>& own) {
  std::vector<const Problem*> problems;
  for (size_t n = 0; n < calls.size(); ++n) {
    problems.push_back(calls[n]->problem);
    if (!masks[n].classes) continue;
    problems.back() = &own.emplace_back(ProblemOfClasses(*calls[n]->problem, *masks[n].classes));
  }
  return problems;
}

class CudaResidual final : public DeviceResidual {
 public:
  // `parts` are those of the forward that filled the memory.
  CudaResidual(const KernelDevice& device, std::unique_ptr<DeviceMemory> memory,
               absl::Span<const Part> parts)
      : device_(device), memory_(std::move(memory)) {
    for (const Part& part : parts) {
      const Exponents& forward = part.exponents;
      exponents_.push_back({.q = forward.q, .k = forward.k, .v = forward.kept_v});
    }
  }
  int64_t bytes() const override { return memory_->bytes(); }
  const DeviceMemory& MemoryOn(const KernelDevice& device) const {
    CHECK(&device == &device_) << "a residual of another device";
    return *memory_;
  }
  void SetExponents(absl::Span<Part> parts) const {
    CHECK(parts.size() == exponents_.size()) << "a residual of another problem";
    for (size_t n = 0; n < parts.size(); ++n) parts[n].exponents = exponents_[n];
  }

 private:
  const KernelDevice& device_;
  const std::unique_ptr<DeviceMemory> memory_;
  std::vector<Exponents> exponents_;  // of backward's tensors, d_o's aside
};

std::vector<bool> IsHeld(const std::vector<const DeviceMemory*>& held) {
  std::vector<bool> is_held;
  for (const DeviceMemory* memory : held) is_held.push_back(memory != nullptr);
  return is_held;
}

// The lists of masks into the device's memory, as far as they are not there.
absl::Status PlaceMasks(absl::Span<const CallMask> masks, DeviceLaunch& launch, LaunchPlan& plan) {
  for (size_t n = 0; n < masks.size(); ++n) {
    const CallMask& mask = masks[n];
    if (mask.compiled == nullptr) continue;
    CallLayout& at = plan.layouts[n];
    if (mask.held != nullptr) {
      const DeviceMemory& memory = mask.held->memory();
      const Region region = {"mask", 0, mask.layout.bytes, RegionUse::kInput};
      launch.Use(memory, {&region, 1});
      PlaceMask(at, static_cast<int64_t>(memory.address() - launch.arena()));
      RETURN_IF_ERROR(mask.held->Fill(launch, *mask.compiled, *at.problem, mask.layout));
      continue;
    }
    const std::vector<std::byte> image = MaskImage(*mask.compiled, *at.problem, mask.layout);
    RETURN_IF_ERROR(launch.UploadCopy(launch.arena() + static_cast<uint64_t>(at.tile_lists),
                                      image.data(), mask.layout.bytes));
  }
  return absl::OkStatus();
}

// Masks, zeros and constants: all that a launch needs beside its calls' tensors.
absl::Status Prepare(absl::Span<const CallMask> masks, KernelDevice& device, DeviceLaunch& launch,
                     LaunchPlan& plan) {
  RETURN_IF_ERROR(PlaceMasks(masks, launch, plan));
  RETURN_IF_ERROR(SetZero(launch, ZeroedRanges(plan, launch.arena())));
  ASSIGN_OR_RETURN(const std::vector<std::byte> constants, plan.Constants(launch.arena(), device));
  return launch.UploadCopy(launch.arena() + static_cast<uint64_t>(plan.constants_begin),
                           constants.data(), static_cast<int64_t>(constants.size()));
}

template <class Call>
bool AnyWanted(absl::Span<const Call* const> calls) {
  return std::any_of(calls.begin(), calls.end(),
                     [](const Call* call) { return !call->stop.stop_requested(); });
}

LaunchPlan PlanElsewhere(const Problem& problem, const ForwardKernels& kernels,
                         absl::Span<const CallMask> masks) {
  return PlanForwardElsewhere(problem, kernels, masks);
}
LaunchPlan PlanElsewhere(const Problem& problem, const BackwardKernels& kernels,
                         absl::Span<const CallMask> masks) {
  return PlanBackwardElsewhere(problem, kernels, masks);
}

}  // namespace

CudaBackend::CudaBackend(std::unique_ptr<KernelDevice> device, std::shared_ptr<MaskPlans> plans,
                         std::optional<MaskWay> mask_way)
    : device_(std::move(device)),
      plans_(plans != nullptr ? std::move(plans) : std::make_shared<MaskPlans>()),
      mask_way_(mask_way),
      masks_(*device_) {
  for (auto& rate : seconds_per_flop_) rate = 1 / std::max(1.0, info().flops_per_second);
}

absl::StatusOr<ForwardKernels> CudaBackend::ForwardKernelsOf(const Problem& p) const {
  ASSIGN_OR_RETURN(const auto classes, ChooseClasses(p, mask_way_));
  if (!classes) return ChooseForward(device_->rows(), p, TilesOf(mask_way_), *plans_);
  ASSIGN_OR_RETURN(ForwardKernels kernels,
                   SelectForward(device_->rows(), ProblemOfClasses(p, *classes)));
  kernels.by_residue = true;
  return kernels;
}

absl::StatusOr<BackwardKernels> CudaBackend::BackwardKernelsOf(const Problem& p) const {
  ASSIGN_OR_RETURN(const auto classes, ChooseClasses(p, mask_way_));
  if (!classes) return ChooseBackward(device_->rows(), p, TilesOf(mask_way_), *plans_);
  ASSIGN_OR_RETURN(BackwardKernels kernels,
                   SelectBackward(device_->rows(), ProblemOfClasses(p, *classes)));
  kernels.by_residue = true;
  return kernels;
}

std::optional<ResidueClasses> CudaBackend::ClassesOf(const Problem& p) const {
  return ChooseClasses(p, mask_way_).value_or(std::nullopt);
}

absl::Status CudaBackend::Supports(const Problem& problem, Direction direction) const {
  if (direction == Direction::kForward) {
    ASSIGN_OR_RETURN(ForwardKernels kernels, ForwardKernelsOf(problem));
    RETURN_IF_ERROR(device_->Check(kernels.mask_tiles));
    RETURN_IF_ERROR(MaskFor(problem, kernels).status());
    for (const auto& row : {kernels.dropout_bits, kernels.merge}) {
      if (row) RETURN_IF_ERROR(device_->Check(*row));
    }
    return device_->Check(kernels.forward);
  }
  ASSIGN_OR_RETURN(BackwardKernels kernels, BackwardKernelsOf(problem));
  RETURN_IF_ERROR(MaskFor(problem, kernels).status());
  RETURN_IF_ERROR(device_->Check(kernels.mask_tiles));
  RETURN_IF_ERROR(device_->Check(kernels.delta));
  RETURN_IF_ERROR(device_->Check(kernels.backward));
  for (const auto& row :
       {kernels.sink_gradient, kernels.bias_gradient, kernels.dropout_bits, kernels.merge}) {
    if (row) RETURN_IF_ERROR(device_->Check(*row));
  }
  return device_->Check(kernels.query_gradient);
}

absl::StatusOr<MaskKernel> CudaBackend::KernelForMask(const Problem& problem,
                                                      Direction direction) const {
  RETURN_IF_ERROR(Supports(problem, direction));
  const auto kernel_of = [&](const auto& kernels) {
    return MaskKernel{
        .kernel = ReportedName(kernels),
        .reason = ReasonOf(problem, ClassesOf(problem), ReasonOfLists(MainRow(kernels))),
        .plan = OptionsOf(TilingOf(kernels))};
  };
  if (direction == Direction::kForward) {
    ASSIGN_OR_RETURN(const ForwardKernels kernels, ForwardKernelsOf(problem));
    return kernel_of(kernels);
  }
  ASSIGN_OR_RETURN(const BackwardKernels kernels, BackwardKernelsOf(problem));
  return kernel_of(kernels);
}

Travel CudaBackend::TravelOf(const Problem& problem) const {
  const std::vector<KernelRow>& rows = device_->rows();
  const bool is_native = std::any_of(rows.begin(), rows.end(), [&](const KernelRow& row) {
    return row.kind == KernelKind::kForward && row.element == problem.element &&
           cuda::TravelOf(row) == Travel::kAsItIs;
  });
  return is_native ? Travel::kAsItIs : Travel::kAsHalves;
}

int64_t CudaBackend::WorkspaceBytes(const Problem& problem, Direction direction) const {
  return TransferScratchBytes(problem, direction, TravelOf(problem),
                              ClassesOf(problem).has_value());
}

int64_t CudaBackend::DeviceBytes(const Problem& problem, Direction direction) const {
  if (direction == Direction::kForward) {
    absl::StatusOr<ForwardKernels> kernels = ForwardKernelsOf(problem);
    if (!kernels.ok()) return 0;
    const absl::StatusOr<CallMask> mask = MaskFor(problem, *kernels);
    return mask.ok() ? ForwardArenaBytes(problem, *kernels, &*mask) : 0;
  }
  absl::StatusOr<BackwardKernels> kernels = BackwardKernelsOf(problem);
  if (!kernels.ok()) return 0;
  const absl::StatusOr<CallMask> mask = MaskFor(problem, *kernels);
  return mask.ok() ? BackwardArenaBytes(problem, *kernels, &*mask) : 0;
}

template <class Kernels>
absl::StatusOr<CallMask> CudaBackend::MaskFor(const Problem& problem,
                                              const Kernels& kernels) const {
  if constexpr (std::is_same_v<Kernels, CaptureKernels>) {
    return ListMask(problem, TilingOf(kernels), /*may_cut=*/false, *plans_);
  } else {
    if (!kernels.by_residue) {
      return ListMask(problem, TilingOf(kernels), kernels.merge.has_value(), *plans_);
    }
    CallMask mask;
    ASSIGN_OR_RETURN(mask.classes, ChooseClasses(problem, mask_way_));
    return mask;
  }
}

template <class Call, class Kernels>
absl::StatusOr<std::vector<CallMask>> CudaBackend::MasksOf(absl::Span<const Call* const> calls,
                                                           const Kernels& kernels) {
  std::vector<CallMask> masks;
  for (const Call* call : calls) {
    ASSIGN_OR_RETURN(CallMask mask, MaskFor(*call->problem, kernels));
    if (mask.compiled != nullptr) mask.held = masks_.Find(mask.compiled, mask.layout.bytes);
    masks.push_back(std::move(mask));
  }
  return masks;
}

int64_t CudaBackend::KeepingBytes(const Problem& problem) const {
  const Travel travel = TravelOf(problem);
  return CanKeep(problem, travel) ? KeptForwardBytes(problem, travel, ClassesOf(problem)) : 0;
}

int64_t CudaBackend::ResidualBytes(const Problem& problem) const {
  return CanKeep(problem, TravelOf(problem)) ? ResidualTensorBytes(problem) : 0;
}

absl::StatusOr<LaunchReport> CudaBackend::Forward(absl::Span<const ForwardCall> calls) {
  return RunGroups(
      GroupCalls<ForwardKernels>(calls, [this](const Problem& p) { return ForwardKernelsOf(p); }),
      [this](const auto& kernels, const auto& group) { return RunForward(kernels, group); });
}

absl::StatusOr<LaunchReport> CudaBackend::Backward(absl::Span<const BackwardCall> calls) {
  return RunGroups(
      GroupCalls<BackwardKernels>(calls, [this](const Problem& p) { return BackwardKernelsOf(p); }),
      [this](const auto& kernels, const auto& group) { return RunBackward(kernels, group); });
}

absl::StatusOr<DeviceTimes> CudaBackend::RunForward(const ForwardKernels& kernels,
                                                    absl::Span<const ForwardCall* const> calls) {
  std::vector<std::unique_ptr<DeviceMemory>> kept(calls.size());
  Held held(calls.size(), nullptr);
  for (size_t n = 0; n < calls.size(); ++n) {
    const int64_t bytes = calls[n]->kept == nullptr ? 0 : ResidualBytes(*calls[n]->problem);
    if (bytes > 0) kept[n] = device_->Hold(bytes);
    held[n] = kept[n].get();
  }
  ASSIGN_OR_RETURN(const std::vector<CallMask> masks, MasksOf(calls, kernels));
  std::deque<Problem> own;
  LaunchPlan plan = PlanForward(ProblemsOf(calls, masks, own), kernels, IsHeld(held), masks);
  ASSIGN_OR_RETURN(const DeviceTimes times, Launch(plan, calls, held, masks));
  for (size_t n = 0; n < calls.size(); ++n) {
    if (kept[n] == nullptr) continue;
    *calls[n]->kept =
        std::make_unique<CudaResidual>(*device_, std::move(kept[n]), plan.PartsOfCall(n));
  }
  return times;
}

absl::StatusOr<DeviceTimes> CudaBackend::RunBackward(const BackwardKernels& kernels,
                                                     absl::Span<const BackwardCall* const> calls) {
  Held held(calls.size(), nullptr);
  for (size_t n = 0; n < calls.size(); ++n) {
    if (calls[n]->residual == nullptr) continue;
    held[n] = &static_cast<const CudaResidual*>(calls[n]->residual)->MemoryOn(*device_);
  }
  ASSIGN_OR_RETURN(const std::vector<CallMask> masks, MasksOf(calls, kernels));
  std::deque<Problem> own;
  LaunchPlan plan = PlanBackward(ProblemsOf(calls, masks, own), kernels, IsHeld(held), masks);
  for (size_t n = 0; n < calls.size(); ++n) {
    if (held[n] == nullptr) continue;
    static_cast<const CudaResidual*>(calls[n]->residual)->SetExponents(plan.PartsOfCall(n));
  }
  return Launch(plan, calls, held, masks);
}

absl::Status CudaBackend::SupportsInPlace(const Problem& problem, Direction direction) const {
  if (problem.element != ElementType::kFloat16 && TravelOf(problem) != Travel::kAsItIs) {
    return absl::UnimplementedError(absl::StrCat(
        "element: before sm_80 attention of modules computes float16 alone (offload with "
        "precision=\"f16\"), got ",
        ElementName(problem.element)));
  }
  return Supports(problem, direction);
}

int64_t CudaBackend::ArenaBytesInPlace(const Problem& problem, Direction direction) const {
  Problem p = problem;
  p.bool_mask.reset();
  p.mask = nullptr;
  if (direction == Direction::kForward) {
    absl::StatusOr<ForwardKernels> kernels = SelectForward(device_->rows(), p);
    return kernels.ok() ? ForwardBytesElsewhere(p, *kernels) : 0;
  }
  absl::StatusOr<BackwardKernels> kernels = SelectBackward(device_->rows(), p);
  return kernels.ok() ? BackwardBytesElsewhere(p, *kernels) : 0;
}

template <class Kernels, class Call>
absl::Status CudaBackend::LaunchInPlace(const Kernels& kernels, const Call& call,
                                        const DevicePart& arena) {
  const Problem& p = *call.problem;
  const Call* const calls[] = {&call};
  ASSIGN_OR_RETURN(const std::vector<CallMask> masks, MasksOf(absl::MakeConstSpan(calls), kernels));
  LaunchPlan plan = PlanElsewhere(p, kernels, masks);
  const bool fits = plan.arena.bytes() <= arena.bytes;
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceLaunch> launch,
                   fits ? device_->BeginIn(arena, plan.arena.regions())
                        : device_->Begin(plan.arena.bytes(), plan.arena.regions()));
  if (!fits) {
    const Region all = {"memory", 0, arena.memory->bytes(), RegionUse::kZeroed};
    launch->Use(*arena.memory, {&all, 1});
  }
  CallLayout& at = plan.layouts[0];
  PlaceTensors(at, AddressesOf(call), launch->arena());
  if (p.bool_mask) {
    RETURN_IF_ERROR(launch->UploadCopy(launch->arena() + static_cast<uint64_t>(at.mask),
                                       call.mask_bits, p.bool_mask->bytes()));
  }
  RETURN_IF_ERROR(SetZero(*launch, ZeroedGradients(call)));
  RETURN_IF_ERROR(Prepare(masks, *device_, *launch, plan));
  Cut(plan);
  ASSIGN_OR_RETURN(const bool ran, RunSlices(*launch, plan, absl::MakeConstSpan(calls)));
  ASSIGN_OR_RETURN(const DeviceTimes times, launch->Finish());
  if (!ran) return absl::CancelledError("stopped");
  Learn(plan, times.kernel);
  return absl::OkStatus();
}

template <class Kernels, class Call>
InPlaceCall CudaBackend::PlanInPlace(const Kernels& kernels, const Call& call,
                                     const DevicePart& arena) const {
  const Problem& p = *call.problem;
  CHECK(!HasMask(p));
  LaunchPlan plan = PlanElsewhere(p, kernels, {});
  PlaceTensors(plan.layouts[0], AddressesOf(call), arena.address());
  std::vector<DeviceRange> zeroed = ZeroedGradients(call);
  Cut(plan);
  const double seconds = plan.flops * seconds_per_flop_[static_cast<int>(plan.direction)];
  return InPlaceCall(std::move(plan), arena.address(), std::move(zeroed), seconds);
}

absl::StatusOr<InPlaceCall> CudaBackend::PlanInPlace(const ForwardCall& call,
                                                     const DevicePart& arena) const {
  ASSIGN_OR_RETURN(const ForwardKernels kernels, SelectForward(device_->rows(), *call.problem));
  return PlanInPlace(kernels, call, arena);
}

absl::StatusOr<InPlaceCall> CudaBackend::PlanInPlace(const BackwardCall& call,
                                                     const DevicePart& arena) const {
  ASSIGN_OR_RETURN(const BackwardKernels kernels, SelectBackward(device_->rows(), *call.problem));
  return PlanInPlace(kernels, call, arena);
}

absl::Status CudaBackend::RunInPlace(const ForwardCall& call, const DevicePart& arena) {
  ASSIGN_OR_RETURN(const ForwardKernels kernels, SelectForward(device_->rows(), *call.problem));
  return LaunchInPlace(kernels, call, arena);
}

absl::Status CudaBackend::RunInPlace(const BackwardCall& call, const DevicePart& arena) {
  ASSIGN_OR_RETURN(const BackwardKernels kernels, SelectBackward(device_->rows(), *call.problem));
  return LaunchInPlace(kernels, call, arena);
}

absl::Status CudaBackend::SupportsCapture() const {
  for (const KernelRow& row : device_->rows()) {
    const bool captures =
        row.kind == KernelKind::kCaptureScores || row.kind == KernelKind::kCaptureSums;
    if (captures) RETURN_IF_ERROR(device_->Check(row));
  }
  return absl::OkStatus();
}

int64_t CudaBackend::CaptureBytes(const Problem& problem, const CaptureRequest& request) const {
  const absl::StatusOr<CaptureKernels> kernels = SelectCapture(device_->rows(), problem);
  if (!kernels.ok()) return 0;
  const absl::StatusOr<CallMask> mask = MaskFor(problem, *kernels);
  return mask.ok() ? CaptureArenaBytes(problem, *kernels, request, *mask) : 0;
}

absl::StatusOr<CapturedMap> CudaBackend::Capture(const ForwardCall& call,
                                                 const CaptureRequest& request) {
  const Problem& p = *call.problem;
  ASSIGN_OR_RETURN(const CaptureKernels kernels, SelectCapture(device_->rows(), p));
  const ForwardCall* const calls[] = {&call};
  ASSIGN_OR_RETURN(const std::vector<CallMask> masks, MasksOf(absl::MakeConstSpan(calls), kernels));
  CapturePlan plan = PlanCapture(p, kernels, request, masks[0],
                                 SlicesOf(Flops(p, Direction::kForward), Direction::kForward),
                                 Wave(kernels.scores));
  LaunchPlan& own = plan.launch;
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceLaunch> launch,
                   device_->Begin(own.arena.bytes(), own.arena.regions()));
  const uint64_t arena = launch->arena();
  Transfer transfer(*launch, own.arena.bytes());
  RETURN_IF_ERROR(transfer.ScoresIn(own.layouts[0], call, own.PartsOfCall(0)));
  RETURN_IF_ERROR(transfer.FlushIn());
  RETURN_IF_ERROR(Prepare(masks, *device_, *launch, own));
  const CaptureDesc capture = plan.Describe(arena);
  RETURN_IF_ERROR(launch->UploadCopy(arena + static_cast<uint64_t>(plan.capture_at), &capture,
                                     sizeof(capture)));
  for (int slab = 0; slab < plan.slabs(); ++slab) {
    ASSIGN_OR_RETURN(const bool ran, launch->Run(plan.Slab(arena, slab),
                                                 [&] { return !call.stop.stop_requested(); }));
    if (!ran) return CapturedMap();
  }
  std::vector<double> cells(static_cast<size_t>(plan.cells));
  std::vector<double> moments(static_cast<size_t>(plan.tiles * 3));
  std::vector<float> map(static_cast<size_t>(request.keep_map ? p.q_len * p.kv_len : 0));
  const auto bring = [&](auto& to, int64_t from) {
    return to.empty()
               ? absl::OkStatus()
               : launch->Download({.device = arena + static_cast<uint64_t>(from),
                                   .host = reinterpret_cast<std::byte*>(to.data()),
                                   .bytes = static_cast<int64_t>(to.size() * sizeof(to[0]))});
  };
  RETURN_IF_ERROR(bring(cells, plan.cells_at));
  RETURN_IF_ERROR(bring(moments, plan.moments_at));
  RETURN_IF_ERROR(bring(map, plan.map_at));
  RETURN_IF_ERROR(launch->Finish().status());
  CapturedMap captured = CapturedFrom(plan, cells, moments);
  captured.map = std::move(map);
  return captured;
}

template <class Call>
absl::StatusOr<DeviceTimes> CudaBackend::Launch(LaunchPlan& plan,
                                                absl::Span<const Call* const> calls,
                                                const Held& held,
                                                absl::Span<const CallMask> masks) {
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceLaunch> launch,
                   device_->Begin(plan.arena.bytes(), plan.arena.regions()));
  for (size_t n = 0; n < calls.size(); ++n) {
    if (held[n] == nullptr) continue;
    launch->Use(*held[n], plan.held[n].regions());
    PlaceOutside(plan.layouts[n], static_cast<int64_t>(held[n]->address() - launch->arena()));
  }
  if (!AnyWanted(calls)) return DeviceTimes();  // Begin may have waited
  Transfer transfer(*launch, plan.arena.bytes());
  for (size_t n = 0; n < calls.size(); ++n) {
    RETURN_IF_ERROR(transfer.In(plan.layouts[n], *calls[n], plan.PartsOfCall(n)));
  }
  RETURN_IF_ERROR(transfer.FlushIn());
  RETURN_IF_ERROR(Prepare(masks, *device_, *launch, plan));
  Cut(plan);
  ASSIGN_OR_RETURN(const bool ran, RunSlices(*launch, plan, calls));
  if (!ran) return DeviceTimes();
  for (size_t n = 0; n < calls.size(); ++n) {
    RETURN_IF_ERROR(transfer.Out(plan.layouts[n], *calls[n], plan.PartsOfCall(n)));
  }
  RETURN_IF_ERROR(transfer.FlushOut());
  ASSIGN_OR_RETURN(const DeviceTimes times, launch->Finish());
  transfer.Convert();
  Learn(plan, times.kernel);
  return times;
}

// False when all calls were cancelled and the kernels were left out or cut short.
template <class Call>
absl::StatusOr<bool> CudaBackend::RunSlices(DeviceLaunch& launch, const LaunchPlan& plan,
                                            absl::Span<const Call* const> calls) {
  for (int slice = 0; slice < plan.slices(); ++slice) {
    ASSIGN_OR_RETURN(const bool ran, launch.Run(plan.Slice(launch.arena(), slice),
                                                [&] { return AnyWanted(calls); }));
    if (!ran) return false;
  }
  return true;
}

int CudaBackend::SlicesOf(double flops, Direction direction) const {
  const double rate = seconds_per_flop_[static_cast<int>(direction)];
  const double seconds = flops * rate;
  if (seconds <= device_->max_slice_seconds()) return 1;
  const double slices = std::ceil(kSliceMargin * seconds / device_->max_slice_seconds());
  return static_cast<int>(std::min<double>(slices, kMaxSlices));
}

int64_t CudaBackend::Wave(const KernelRow& row) const {
  return int64_t{device_->multiprocessors()} * std::max(1, row.tile.blocks_per_sm);
}

void CudaBackend::Cut(LaunchPlan& plan) const {
  plan.Cut(SlicesOf(plan.flops, plan.direction), Wave(plan.main().row));
}

void CudaBackend::Learn(const LaunchPlan& plan, double seconds) {
  // Tiles that a bool mask empties take no time, which would make later launches look short; those
  // of a launch that leaves multiprocessors idle would make them look long.
  if (seconds < kMinLessonSeconds || plan.flops <= 0 || plan.has_bool_masks) return;
  const PlannedKernel& main = plan.main();
  if (static_cast<int64_t>(plan.tiles[main.tiles].size()) < Wave(main.row)) return;
  std::atomic<double>& rate = seconds_per_flop_[static_cast<int>(plan.direction)];
  const double old_rate = rate;
  // Two launches at once may lose one lesson, which does no harm.
  rate = old_rate + kNewWeight * (seconds / plan.flops - old_rate);
}

}  // namespace attnd::cuda
