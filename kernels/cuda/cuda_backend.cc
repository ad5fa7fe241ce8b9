#include "kernels/cuda/cuda_backend.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/cuda/transfer.h"

namespace attnd::cuda {
namespace {

// The tiles of one kernel and where the device finds them.
struct TileList {
  std::vector<TileWork> tiles;
  int64_t offset = 0;
};

// A launch's descriptors: parts of all calls, one after the other.
struct Parts {
  std::vector<const Problem*> problems;
  std::vector<Part> all;
  std::vector<size_t> first;  // of each call, and the end

  absl::Span<Part> Of(size_t call) {
    return absl::MakeSpan(all).subspan(first[call], first[call + 1] - first[call]);
  }
};

template <class Call>
Parts PartsOfCalls(absl::Span<const Call* const> calls) {
  Parts parts;
  for (size_t n = 0; n < calls.size(); ++n) {
    parts.problems.push_back(calls[n]->problem);
    parts.first.push_back(parts.all.size());
    for (const Part& part : PartsOf(*calls[n]->problem, static_cast<int>(n))) {
      parts.all.push_back(part);
    }
  }
  parts.first.push_back(parts.all.size());
  return parts;
}

void AddTiles(TileList& list, const char* name, ArenaLayout& arena) {
  list.offset = arena.Add(name, static_cast<int64_t>(list.tiles.size() * sizeof(TileWork)),
                          RegionUse::kInput);
}

int64_t AddDescriptors(const Parts& parts, ArenaLayout& arena) {
  return arena.Add("problems", static_cast<int64_t>(parts.all.size() * sizeof(ProblemDesc)),
                   RegionUse::kInput);
}

absl::Status CopyTiles(KernelDevice& device, uint64_t arena, const TileList& list) {
  if (list.tiles.empty()) return absl::OkStatus();
  return device.CopyIn(arena + list.offset, list.tiles.data(),
                       static_cast<int64_t>(list.tiles.size() * sizeof(TileWork)));
}

absl::Status RunTiles(KernelDevice& device, const KernelRow& row, uint64_t arena, int64_t problems,
                      const TileList& list) {
  if (list.tiles.empty()) return absl::OkStatus();
  LaunchParams params;
  params.problems = reinterpret_cast<const ProblemDesc*>(arena + problems);
  params.tiles = reinterpret_cast<const TileWork*>(arena + list.offset);
  params.tile_count = static_cast<int32_t>(list.tiles.size());
  return device.Run(row, params);
}

absl::Status CopyDescriptors(KernelDevice& device, uint64_t arena, int64_t offset,
                             absl::Span<const CallLayout> layouts, absl::Span<const Part> parts) {
  std::vector<ProblemDesc> descs;
  for (const Part& part : parts) descs.push_back(Describe(layouts[part.call], part, arena));
  return device.CopyIn(arena + offset, descs.data(),
                       static_cast<int64_t>(descs.size() * sizeof(ProblemDesc)));
}

absl::Status ZeroRegions(KernelDevice& device, uint64_t arena, const ArenaLayout& layout) {
  for (const Region& region : layout.regions()) {
    if (region.use != RegionUse::kZeroed || region.bytes == 0) continue;
    RETURN_IF_ERROR(device.SetZero(arena + region.offset, region.bytes));
  }
  return absl::OkStatus();
}

// Calls that share kernels, by their names. Those that nobody waits for are left out.
template <class Kernels, class Call>
struct Group {
  Kernels kernels;
  std::vector<const Call*> calls;
};

const KernelRow& MainRow(const ForwardKernels& kernels) { return kernels.forward; }
const KernelRow& MainRow(const BackwardKernels& kernels) { return kernels.backward; }
std::string KeyOf(const ForwardKernels& kernels) { return NameOf(kernels.forward); }
std::string KeyOf(const BackwardKernels& kernels) {
  return absl::StrCat(NameOf(kernels.backward), kernels.sink_gradient ? "+sink" : "",
                      kernels.bias_gradient ? "+bias" : "");
}

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
  return groups;
}

// Kernels that differ run one launch after the other; the report names the first and sums the time.
template <class Kernels, class Call, class Run>
absl::StatusOr<LaunchReport> RunGroups(const std::map<std::string, Group<Kernels, Call>>& groups,
                                       const std::string& prefix, const Run& run) {
  LaunchReport report;
  for (const auto& [name, group] : groups) {
    ASSIGN_OR_RETURN(double seconds, run(group.kernels, group.calls));
    report.seconds += seconds;
    if (report.kernel.empty()) report.kernel = absl::StrCat(prefix, NameOf(MainRow(group.kernels)));
    const KernelRow& row = MainRow(group.kernels);
    if (row.half_accumulate) report.accumulate = AccumulateType::kFloat16;
    report.deterministic = report.deterministic && row.ordered;
  }
  return report;
}

}  // namespace

CudaBackend::CudaBackend(std::unique_ptr<KernelDevice> device) : device_(std::move(device)) {}

absl::Status CudaBackend::Supports(const Problem& problem, Direction direction) const {
  if (direction == Direction::kForward) {
    ASSIGN_OR_RETURN(ForwardKernels kernels, SelectForward(KernelRows(), problem));
    return device_->Check(kernels.forward);
  }
  ASSIGN_OR_RETURN(BackwardKernels kernels, SelectBackward(KernelRows(), problem));
  RETURN_IF_ERROR(device_->Check(kernels.delta));
  RETURN_IF_ERROR(device_->Check(kernels.backward));
  if (kernels.sink_gradient) RETURN_IF_ERROR(device_->Check(*kernels.sink_gradient));
  if (kernels.bias_gradient) RETURN_IF_ERROR(device_->Check(*kernels.bias_gradient));
  return device_->Check(kernels.query_gradient);
}

absl::StatusOr<LaunchReport> CudaBackend::Forward(absl::Span<const ForwardCall> calls) {
  auto groups = GroupCalls<ForwardKernels>(
      calls, [](const Problem& problem) { return SelectForward(KernelRows(), problem); });
  return RunGroups(groups, "cuda_", [this](const ForwardKernels& kernels, const auto& group) {
    return RunForward(kernels, group);
  });
}

absl::StatusOr<LaunchReport> CudaBackend::Backward(absl::Span<const BackwardCall> calls) {
  auto groups = GroupCalls<BackwardKernels>(
      calls, [](const Problem& problem) { return SelectBackward(KernelRows(), problem); });
  return RunGroups(groups, "cuda_", [this](const BackwardKernels& kernels, const auto& group) {
    return RunBackward(kernels, group);
  });
}

absl::StatusOr<double> CudaBackend::RunForward(const ForwardKernels& kernels,
                                               absl::Span<const ForwardCall* const> calls) {
  Parts parts = PartsOfCalls(calls);
  ArenaLayout arena;
  std::vector<CallLayout> layouts;
  for (const ForwardCall* call : calls) layouts.push_back(LayOutForward(*call->problem, arena));
  TileList tiles = {ForwardTiles(parts.problems, parts.all, kernels.forward.tile.q_rows)};
  AddTiles(tiles, "tiles", arena);
  const int64_t problems = AddDescriptors(parts, arena);
  ASSIGN_OR_RETURN(const uint64_t base, device_->Reserve(arena.bytes(), arena.regions()));
  Transfer transfer(*device_, base);
  for (size_t n = 0; n < calls.size(); ++n) {
    RETURN_IF_ERROR(transfer.In(layouts[n], *calls[n], parts.Of(n)));
  }
  RETURN_IF_ERROR(CopyDescriptors(*device_, base, problems, layouts, parts.all));
  RETURN_IF_ERROR(CopyTiles(*device_, base, tiles));
  RETURN_IF_ERROR(RunTiles(*device_, kernels.forward, base, problems, tiles));
  ASSIGN_OR_RETURN(const double seconds, device_->Finish());
  for (size_t n = 0; n < calls.size(); ++n) {
    RETURN_IF_ERROR(transfer.Out(layouts[n], *calls[n], parts.Of(n)));
  }
  return seconds;
}

absl::StatusOr<double> CudaBackend::RunBackward(const BackwardKernels& kernels,
                                                absl::Span<const BackwardCall* const> calls) {
  Parts parts = PartsOfCalls(calls);
  ArenaLayout arena;
  std::vector<CallLayout> layouts;
  for (const BackwardCall* call : calls) {
    layouts.push_back(LayOutBackward(*call->problem, kernels.backward.tile.head_dim, arena));
  }
  // The kernels in order, each with its tiles.
  std::vector<std::pair<KernelRow, TileList>> steps;
  const std::vector<TileWork> rows = RowBlockTiles(parts.problems, parts.all);
  steps.push_back({kernels.delta, {rows}});
  steps.push_back({kernels.backward,
                   {BackwardTiles(parts.problems, parts.all, kernels.backward.tile.kv_rows)}});
  steps.push_back({kernels.query_gradient, {rows}});
  if (kernels.sink_gradient) {
    steps.push_back({*kernels.sink_gradient, {HeadTiles(parts.problems, parts.all)}});
  }
  if (kernels.bias_gradient) {
    steps.push_back({*kernels.bias_gradient, {BiasTiles(parts.problems, parts.all)}});
  }
  for (auto& [row, tiles] : steps) AddTiles(tiles, "tiles", arena);
  const int64_t problems = AddDescriptors(parts, arena);
  ASSIGN_OR_RETURN(const uint64_t base, device_->Reserve(arena.bytes(), arena.regions()));
  Transfer transfer(*device_, base);
  for (size_t n = 0; n < calls.size(); ++n) {
    RETURN_IF_ERROR(transfer.In(layouts[n], *calls[n], parts.Of(n)));
  }
  RETURN_IF_ERROR(ZeroRegions(*device_, base, arena));
  RETURN_IF_ERROR(CopyDescriptors(*device_, base, problems, layouts, parts.all));
  for (auto& [row, tiles] : steps) RETURN_IF_ERROR(CopyTiles(*device_, base, tiles));
  for (auto& [row, tiles] : steps) {
    RETURN_IF_ERROR(RunTiles(*device_, row, base, problems, tiles));
  }
  ASSIGN_OR_RETURN(const double seconds, device_->Finish());
  for (size_t n = 0; n < calls.size(); ++n) {
    RETURN_IF_ERROR(transfer.Out(layouts[n], *calls[n], parts.Of(n)));
  }
  return seconds;
}

}  // namespace attnd::cuda
