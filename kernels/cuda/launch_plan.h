// LaunchPlan: one launch of calls that share kernels: its arena, the kernels in order with their
// tiles, and how the main kernel can be cut into slices. Pure; nothing here touches a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/cuda/layout/dropout_parts.h"
#include "kernels/cuda/layout/launch_layout.h"
#include "kernels/cuda/layout/list_runs.h"
#include "kernels/cuda/selection.h"

namespace attnd::cuda {

// A kernel of a launch and the tiles that it visits.
struct PlannedKernel {
  KernelRow row;
  size_t tiles = 0;  // index into LaunchPlan::tiles
  // Belongs to the long list, which slices cut: what tiles cost up to each, and all of them. Else
  // empty.
  std::vector<int64_t> work;
};

// Dropout's decisions, made ahead of the main kernel for a part of its tiles at a time.
struct PlannedDropout {
  KernelRow row;
  DropoutParts parts;
  int64_t bits_offset = 0, first_rounds_offset = 0;  // in the arena
};

struct LaunchPlan {
  ArenaLayout arena;
  std::vector<CallLayout> layouts;  // of each call
  std::vector<ArenaLayout> held;    // of each call: its tensors in memory of their own, or nothing
  std::vector<Part> parts;          // of all calls, one after the other
  std::vector<size_t> first_part;   // of each call, and the end
  // Lines of masks' lists that are cut, part after part; after the parts' problems come those of
  // their runs, kListRuns each.
  std::vector<CutLine> cut_lines;
  Direction direction = Direction::kForward;
  int64_t cut_rows = 0;  // rows (keys) of a tile of the main kernel
  std::vector<std::vector<TileWork>> tiles;
  std::vector<int64_t> tile_offsets;  // in the arena
  int64_t problems_offset = 0;        // of the descriptors
  int64_t maps_offset = -1;           // of the main kernel's tensor maps, if it has some
  bool counts_tiles = false;          // the main kernel's blocks take tile after tile
  int64_t taken_offset = -1;          // then LaunchParams::taken
  // Zeros for `taken`, sequences, slopes, descriptors, tiles: to the arena's end, or elsewhere
  // (PlaceConstants).
  int64_t constants_begin = 0;
  int64_t constants_shift = 0;  // how far behind their place in the arena they lie
  std::vector<PlannedKernel> kernels;
  std::optional<KernelRow> mapped;  // the main kernel, if it loads by tensor maps
  std::optional<PlannedDropout> dropout;
  std::optional<size_t> row_tiles;  // index of LaunchParams::row_tiles, if the main kernel has some
  double flops = 0;                 // at most: what bool masks empty is counted
  std::vector<int64_t> cuts;        // between slices: the first tile of the main kernel's next one
  bool has_bool_masks = false;

  // Adds what every launch has, in this order: parts first, constants last.
  void AddParts(absl::Span<const Problem* const> problems, Travel travel,
                absl::Span<const CallMask> masks = {});
  // The problem of each part's first run; to be asked for once, before tiles are.
  std::vector<size_t> AddRuns(absl::Span<const Problem* const> problems,
                              absl::Span<const CallMask> masks, Direction direction, int64_t rows);
  const Part& PartOf(const TileWork& tile) const;
  int64_t problem_count() const {
    return static_cast<int64_t>(parts.size() + cut_lines.size() * kListRuns);
  }
  size_t AddTiles(std::vector<TileWork> tiles);  // index
  // A kernel that lists bool masks, if there are some.
  void AddMaskTiles(const KernelRow& row);
  void AddMerging(const std::optional<KernelRow>& row, std::vector<TileWork> tiles);
  // Before the main kernel's tiles, which visit so many rows (keys) each.
  void AddDropout(const KernelRow& bits, const DropoutRound& round,
                  const std::vector<int64_t>& visited);
  void AddConstants();
  // Constants lie at this address, behind the arena, which keeps no place for them.
  void PlaceConstants(uint64_t arena_address, uint64_t address);

  // Makes a kernel's step on tiles [begin, end) of a list.
  KernelStep StepOf(uint64_t arena_address, const KernelRow& row, size_t list, int64_t begin,
                    int64_t end) const;

  absl::Span<Part> PartsOfCall(size_t call) {
    return absl::MakeSpan(parts).subspan(first_part[call], first_part[call + 1] - first_part[call]);
  }
  // The one that slices cut.
  const PlannedKernel& main() const;
  // Cuts its tiles into at most so many slices of like work, none but the last of less than `least`
  // tiles: fewer than a device runs at once take as long as these. Uncut it is one slice.
  void Cut(int most, int64_t least);
  int slices() const { return static_cast<int>(cuts.size()) + 1; }
  // Returns the bytes of [constants_begin, arena.bytes()), for an arena at this address. After the
  // parts' exponents are known. `device` encodes maps.
  absl::StatusOr<std::vector<std::byte>> Constants(uint64_t arena_address,
                                                   const KernelDevice& device) const;
  // The kernels of a slice: those before the main one go with the first, those after it with the
  // last.
  std::vector<KernelStep> Slice(uint64_t arena_address, int slice) const;
  // Adds the main kernel's steps on its tiles [begin, end), and what is made ahead of it for these
  // alone.
  void AddMainSteps(uint64_t arena_address, const PlannedKernel& kernel, int64_t begin, int64_t end,
                    std::vector<KernelStep>& steps) const;
};

// Tiles as the loops of these kernels visit them.
MaskTiling TilingOf(const ForwardKernels& kernels);
MaskTiling TilingOf(const BackwardKernels& kernels);

// `held` says which calls' tensors (LayOutTensors) lie outside the arena; their layouts count from
// there until PlaceOutside. `masks`: of each call for TilingOf(kernels), or nothing; those that are
// held lie outside until PlaceMask. A call by classes comes as ProblemOfClasses (residue_choice.h).
LaunchPlan PlanForward(absl::Span<const Problem* const> problems, const ForwardKernels& kernels,
                       const std::vector<bool>& held, absl::Span<const CallMask> masks = {});
LaunchPlan PlanBackward(absl::Span<const Problem* const> problems, const BackwardKernels& kernels,
                        const std::vector<bool>& held, absl::Span<const CallMask> masks = {});
// Plans one call whose tensors are LayOutElsewhere's.
LaunchPlan PlanForwardElsewhere(const Problem& problem, const ForwardKernels& kernels,
                                absl::Span<const CallMask> masks);
LaunchPlan PlanBackwardElsewhere(const Problem& problem, const BackwardKernels& kernels,
                                 absl::Span<const CallMask> masks);

// Counts the bytes of the tensors that forward leaves for backward.
int64_t ResidualTensorBytes(const Problem& problem);

// How tensors reach these kernels.
Travel TravelOf(const KernelRow& row);

// At least what a launch of this problem alone takes, and what it adds to a launch of several; of a
// forward with what it leaves.
// Without the tiles themselves: cheap for any length. `mask`: as above, if it has one.
int64_t ForwardArenaBytes(const Problem& problem, const ForwardKernels& kernels,
                          const CallMask* mask = nullptr);
int64_t BackwardArenaBytes(const Problem& problem, const BackwardKernels& kernels,
                           const CallMask* mask = nullptr);
// The same where tensors are LayOutElsewhere's.
int64_t ForwardBytesElsewhere(const Problem& problem, const ForwardKernels& kernels);
int64_t BackwardBytesElsewhere(const Problem& problem, const BackwardKernels& kernels);
// A forward takes so many bytes beside that when its tensors stay: for bfloat16 as halves V and O
// once more.
int64_t KeptForwardBytes(const Problem& problem, Travel travel,
                         const std::optional<ResidueClasses>& classes = std::nullopt);

}  // namespace attnd::cuda
