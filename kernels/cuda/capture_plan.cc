#include "kernels/cuda/capture_plan.h"

#include <algorithm>
#include <numeric>

#include "base/round_up.h"
#include "kernels/cuda/layout/tile_work.h"

namespace attnd::cuda {
namespace {

// Slots for the sums of a tile each: 64 MiB, enough that blocks fill the largest GPU several times.
constexpr int64_t kSlots = 1024;
constexpr int64_t kMaxSplits = 32;  // more sums to add take longer than they save

int64_t TilesOf(const Problem& p, const CaptureKernels& kernels) {
  return DivideUp(p.q_len, kCaptureRows) * DivideUp(p.kv_len, kernels.scores.tile.kv_rows);
}
// By the problem alone: sums have the same bits on every device.
int64_t SplitsOf(const Problem& p, const CaptureKernels& kernels) {
  return std::clamp<int64_t>(kSlots / TilesOf(p, kernels), 1,
                             std::min(kMaxSplits, p.batch * p.q_heads));
}
int64_t SlabTiles(const Problem& p, const CaptureKernels& kernels) {
  return std::min(TilesOf(p, kernels), kSlots / SplitsOf(p, kernels));
}

// Counts, for each tile of `tile` positions, the blocks that have a part of it.
std::vector<int64_t> CellsAlong(int64_t length, int64_t tile, int64_t block) {
  std::vector<int64_t> cells;
  for (int64_t begin = 0; begin < length; begin += tile) {
    cells.push_back((std::min(begin + tile, length) - 1) / block - begin / block + 1);
  }
  return cells;
}
struct Cells {
  std::vector<int64_t> rows, keys;  // of the map's row and key tiles

  explicit Cells(const CaptureDesc& c)
      : rows(CellsAlong(c.rows, kCaptureRows, c.block)),
        keys(CellsAlong(c.keys, c.tile_keys, c.block)) {}
  int64_t OfTile(int64_t tile) const {
    const auto key_tiles = static_cast<int64_t>(keys.size());
    return rows[tile / key_tiles] * keys[tile % key_tiles];
  }
  int64_t All() const {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0}) *
           std::accumulate(keys.begin(), keys.end(), int64_t{0});
  }
};

// Lays out what the kernels write.
void LayOutResults(const Problem& p, const CaptureRequest& request, CapturePlan& plan) {
  ArenaLayout& arena = plan.launch.arena;
  const int64_t slot = int64_t{kCaptureRows} * plan.capture.tile_keys;
  plan.sums_at =
      arena.Add("sums", plan.slab_tiles * plan.capture.splits * slot * 4, RegionUse::kOutput);
  plan.cells_at = arena.Add("cells", plan.cells * 8, RegionUse::kOutput);
  plan.moments_at = arena.Add("moments", plan.tiles * 3 * 8, RegionUse::kOutput);
  if (request.keep_map) plan.map_at = arena.Add("map", p.q_len * p.kv_len * 4, RegionUse::kOutput);
  plan.capture_at = arena.Add("capture", sizeof(CaptureDesc), RegionUse::kInput);
}

CapturePlan Begin(const Problem& p, const CaptureKernels& kernels, const CaptureRequest& request,
                  const CallMask& mask) {
  CapturePlan plan;
  plan.kernels = kernels;
  plan.tiles = TilesOf(p, kernels);
  plan.slab_tiles = SlabTiles(p, kernels);
  CaptureDesc& capture = plan.capture;
  capture.rows = static_cast<int32_t>(p.q_len);
  capture.keys = static_cast<int32_t>(p.kv_len);
  capture.block = static_cast<int32_t>(request.block);
  capture.tile_keys = kernels.scores.tile.kv_rows;
  capture.key_tiles = static_cast<int32_t>(DivideUp(p.kv_len, capture.tile_keys));
  plan.cells = Cells(capture).All();
  capture.splits = static_cast<int32_t>(SplitsOf(p, kernels));
  capture.share = 1.0f / static_cast<float>(p.batch * p.q_heads);
  capture.origin = 1.0 / static_cast<double>(p.kv_len);
  plan.launch.layouts.push_back(LayOutScores(p, plan.launch.arena, TravelOf(kernels.scores)));
  LayOutTileLists(plan.launch.layouts[0], TilingOf(kernels),
                  mask.compiled == nullptr ? nullptr : &mask, plan.launch.arena);
  LayOutResults(p, request, plan);
  return plan;
}

// Lists each tile in its slab with its slots, one a split.
std::vector<TileWork> ScoresTiles(const CapturePlan& plan) {
  std::vector<TileWork> work;
  const int32_t splits = plan.capture.splits;
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    const auto slot = static_cast<int32_t>(tile % plan.slab_tiles * splits);
    for (int32_t split = 0; split < splits; ++split) {
      work.push_back({0, split, slot + split, static_cast<int32_t>(tile)});
    }
  }
  return work;
}
std::vector<TileWork> SumsTiles(const CapturePlan& plan) {
  const Cells cells(plan.capture);
  std::vector<TileWork> work;
  int64_t cell = 0;
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    const auto slot = static_cast<int32_t>(tile % plan.slab_tiles * plan.capture.splits);
    work.push_back({0, static_cast<int32_t>(cell), slot, static_cast<int32_t>(tile)});
    cell += cells.OfTile(tile);
  }
  return work;
}

template <class T>
T* At(uint64_t arena, int64_t offset) {
  return reinterpret_cast<T*>(arena + static_cast<uint64_t>(offset));
}

}  // namespace

MaskTiling TilingOf(const CaptureKernels& kernels) {
  const ArchitectureInfo& info = InfoOf(kernels.scores.architecture);
  // As forward's tiles of most head dimensions are, so that a plan serves both.
  const int keys = info.architecture == Architecture::kSm70 ? 32 : 64;
  return {kCaptureRows, keys, /*by_keys=*/false, info.lanes};
}

CapturePlan PlanCapture(const Problem& p, const CaptureKernels& kernels,
                        const CaptureRequest& request, const CallMask& mask, int slices,
                        int64_t least) {
  CapturePlan plan = Begin(p, kernels, request, mask);
  const int64_t least_tiles = DivideUp(least, int64_t{plan.capture.splits});
  plan.slab_tiles = std::min(plan.slab_tiles, std::max(least_tiles, DivideUp(plan.tiles, slices)));
  LaunchPlan& launch = plan.launch;
  const Problem* const problems[] = {&p};
  launch.AddParts(problems, TravelOf(kernels.scores));
  plan.capture.parts = static_cast<int32_t>(launch.parts.size());
  plan.capture.heads = static_cast<int32_t>(p.batch * p.q_heads / plan.capture.parts);
  launch.AddTiles(ScoresTiles(plan));
  launch.AddTiles(SumsTiles(plan));
  launch.AddMaskTiles(kernels.mask_tiles);
  launch.AddConstants();
  return plan;
}

int64_t CaptureArenaBytes(const Problem& p, const CaptureKernels& kernels,
                          const CaptureRequest& request, const CallMask& mask) {
  CapturePlan plan = Begin(p, kernels, request, mask);
  LayOutConstants(plan.launch.layouts[0], plan.launch.arena);
  const int64_t lines = MaskLineCount(plan.launch.layouts[0]);
  const int64_t parts = p.batch * p.kv_heads;  // at most
  return plan.launch.arena.bytes() +
         RoundUp(parts * static_cast<int64_t>(sizeof(ProblemDesc)), kRegionAlignment) +
         (plan.tiles * (plan.capture.splits + 1) + lines) * static_cast<int64_t>(sizeof(TileWork)) +
         3 * kRegionAlignment;
}

CaptureDesc CapturePlan::Describe(uint64_t arena) const {
  CaptureDesc described = capture;
  described.sums = At<float>(arena, sums_at);
  described.cells = At<double>(arena, cells_at);
  described.moments = At<double>(arena, moments_at);
  if (map_at >= 0) described.map = At<float>(arena, map_at);
  return described;
}

std::vector<KernelStep> CapturePlan::Slab(uint64_t arena, int slab) const {
  const int64_t begin = slab * slab_tiles, end = std::min(tiles, begin + slab_tiles);
  const int64_t splits = capture.splits;
  std::vector<KernelStep> steps;
  if (slab == 0 && launch.has_bool_masks) {
    const PlannedKernel& lists = launch.kernels.front();
    const auto lines = static_cast<int64_t>(launch.tiles[lists.tiles].size());
    steps.push_back(launch.StepOf(arena, lists.row, lists.tiles, 0, lines));
  }
  steps.push_back(launch.StepOf(arena, kernels.scores, 0, begin * splits, end * splits));
  steps.push_back(launch.StepOf(arena, kernels.sums, 1, begin, end));
  for (KernelStep& step : steps) step.params.capture = At<const CaptureDesc>(arena, capture_at);
  return steps;
}

CapturedMap CapturedFrom(const CapturePlan& plan, const std::vector<double>& cells,
                         const std::vector<double>& moments) {
  const CaptureDesc& c = plan.capture;
  MapSums sums({c.rows, c.keys, c.block}, kCaptureRows, c.tile_keys);
  const double* next = cells.data();
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    next = sums.AddTile(tile / sums.key_tiles(), tile % sums.key_tiles(), next, &moments[tile * 3]);
  }
  return sums.Finish();
}

}  // namespace attnd::cuda
