#include "kernels/cuda/launch_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/cost.h"
#include "base/check.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "kernels/cuda/layout/tile_work.h"

namespace attnd::cuda {
namespace {

int BoxRows(const KernelRow& row, int map) {
  return map == kMapOfQ || map == kMapOfDo ? row.tile.q_rows : row.tile.kv_rows;
}
int64_t MapBytes(const KernelRow& row, int64_t parts) {
  return parts * row.maps * static_cast<int64_t>(sizeof(TensorMap));
}

// Adds what the main kernel needs besides tensors.
void AddMaps(const KernelRow& row, LaunchPlan& plan) {
  if (row.maps > 0) plan.mapped = row;
  plan.counts_tiles = row.stays;
}

// Tiles of `rows` rows over all entries and one head.
int64_t TilesOfHead(const Problem& p, int64_t length, int64_t rows, const CallLayout& at) {
  if (at.classes) {
    return (IsPacked(p.layout) ? 1 : p.batch) * (length / rows) +
           p.batch * ClassCount(p, at.classes);
  }
  if (IsPacked(p.layout)) return length / rows + p.batch;
  return p.batch * ((length + rows - 1) / rows);
}

using Classes = std::optional<ResidueClasses>;

Classes ClassesOf(const CallMask* mask) { return mask == nullptr ? Classes() : mask->classes; }

int64_t PartCount(const Problem& p, Travel travel, const Classes& classes) {
  const int64_t heads = IsConverted(p.element, travel) ? p.kv_heads : 1;
  return (IsConverted(p.element, travel) || classes ? p.batch : 1) * heads * ClassCount(p, classes);
}

int64_t ConstantBytes(int64_t parts, int64_t tiles, int tile_lists) {
  return parts * static_cast<int64_t>(sizeof(ProblemDesc)) +
         tiles * static_cast<int64_t>(sizeof(TileWork)) + (1 + tile_lists) * kRegionAlignment;
}

// A block costs about as much as this many keys (rows), whatever it visits.
constexpr int64_t kBlockWork = 64;

// At most, of the lines that a call's mask cuts.
int64_t RunBytesOf(const Problem& p, Direction direction, int64_t parts, int64_t rows,
                   const CallMask* mask) {
  if (mask == nullptr || mask->cuts.lines.empty()) return 0;
  const auto lines = static_cast<int64_t>(mask->cuts.lines.size());
  const RunShape shape = RunShapeOf(p, direction, p.batch, p.kv_heads, rows);
  const int64_t tiles = shape.entries * shape.heads * (kListRuns + rows / kMergedRows);
  return lines *
             (parts * (kListRuns * static_cast<int64_t>(sizeof(ProblemDesc)) + kRegionAlignment) +
              shape.bytes() * kListRuns + tiles * static_cast<int64_t>(sizeof(TileWork))) +
         kRegionAlignment;
}

// Whether a call costs what its tiles do, rather than what its shape says.
bool IsCounted(absl::Span<const CallMask> masks, size_t call) {
  return !masks.empty() && (masks[call].compiled != nullptr || masks[call].classes);
}

// At most, without the tiles themselves. `tiles`: the main kernel's, each of which visits at most
// `length` rows (keys) of each of `heads` heads.
int64_t DropoutBytesOf(const CallLayout& at, int64_t tiles, int64_t length, int64_t heads,
                       const DropoutRound& round) {
  const int64_t visited = DivideUp(length, ClassCount(*at.problem, at.classes));
  return DropoutBytes(tiles, visited, heads, round) +
         tiles * static_cast<int64_t>(sizeof(uint32_t)) + 2 * kRegionAlignment;
}

// The long kernel, and what its calls with masks by description cost: `own` places a tile, `flops`
// of a score of a call.
template <class FlopsOf>
void AddMain(const KernelRow& row, OrderedTiles ordered, int own, absl::Span<const CallMask> masks,
             const FlopsOf& flops, LaunchPlan& plan) {
  std::vector<int64_t> work = {0};
  for (size_t n = 0; n < ordered.tiles.size(); ++n) {
    work.push_back(work.back() + ordered.work[n] + kBlockWork);
    const size_t call = static_cast<size_t>(plan.PartOf(ordered.tiles[n]).call);
    if (!IsCounted(masks, call)) continue;
    plan.flops += static_cast<double>(ordered.work[n] * own) * flops(*plan.layouts[call].problem);
  }
  plan.kernels.push_back({row, plan.AddTiles(std::move(ordered.tiles)), std::move(work)});
}
const CallMask* MaskOf(absl::Span<const CallMask> masks, size_t call) {
  return masks.empty() || masks[call].compiled == nullptr ? nullptr : &masks[call];
}
DqRests RestsOf(const Problem& p, const BackwardKernels& kernels) {
  if (!kernels.backward.ordered || !NeedsDqRest(p)) return DqRests::kNone;
  return kernels.backward.rests_by_row ? DqRests::kByRow : DqRests::kOfAllRows;
}

DqSums SumsOf(const Problem& p, const BackwardKernels& kernels, bool are_zeroed) {
  return {.tile_head_dim = kernels.backward.tile.head_dim,
          .rests = RestsOf(p, kernels),
          .are_integers = kernels.backward.ordered,
          .are_zeroed = are_zeroed};
}

// The first tile that slice `slice` of `slices` does not have: each has about the same work.
int64_t EndOfSlice(const std::vector<int64_t>& work, int slice, int slices) {
  const double end = static_cast<double>(work.back()) * (slice + 1) / slices;
  return std::partition_point(work.begin() + 1, work.end(),
                              [end](int64_t up_to) { return static_cast<double>(up_to) <= end; }) -
         (work.begin() + 1);
}

}  // namespace

void LaunchPlan::AddParts(absl::Span<const Problem* const> problems, Travel travel,
                          absl::Span<const CallMask> masks) {
  for (size_t n = 0; n < problems.size(); ++n) {
    first_part.push_back(parts.size());
    for (const Part& part : PartsOf(*problems[n], static_cast<int>(n), travel,
                                    masks.empty() ? Classes() : masks[n].classes)) {
      parts.push_back(part);
    }
  }
  first_part.push_back(parts.size());
}

std::vector<size_t> LaunchPlan::AddRuns(absl::Span<const Problem* const> problems,
                                        absl::Span<const CallMask> masks, Direction of,
                                        int64_t rows) {
  direction = of;
  cut_rows = rows;
  std::vector<size_t> first_runs;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Part& part = parts[n];
    first_runs.push_back(static_cast<size_t>(problem_count()));
    if (masks.empty()) continue;
    const RunShape shape =
        RunShapeOf(*problems[part.call], direction, part.batches, part.kv_heads, rows);
    for (const int32_t line : masks[static_cast<size_t>(part.call)].cuts.lines) {
      cut_lines.push_back(
          {n, line, arena.Add("runs", shape.bytes() * kListRuns, RegionUse::kOutput)});
    }
  }
  return first_runs;
}

const Part& LaunchPlan::PartOf(const TileWork& tile) const {
  const auto problem = static_cast<size_t>(tile.problem);
  if (problem < parts.size()) return parts[problem];
  return parts[cut_lines[(problem - parts.size()) / kListRuns].part];
}

size_t LaunchPlan::AddTiles(std::vector<TileWork> added) {
  tiles.push_back(std::move(added));
  return tiles.size() - 1;
}

void LaunchPlan::AddDropout(const KernelRow& bits, const DropoutRound& round,
                            const std::vector<int64_t>& visited) {
  dropout = {.row = bits, .parts = CutForDropout(visited, round)};
  dropout->bits_offset = arena.Add("dropout_bits", dropout->parts.bytes, RegionUse::kOutput);
}

void LaunchPlan::AddMerging(const std::optional<KernelRow>& row, std::vector<TileWork> merged) {
  if (merged.empty()) return;
  CHECK(row.has_value());
  kernels.push_back({*row, AddTiles(std::move(merged)), {}});
}

void LaunchPlan::AddMaskTiles(const KernelRow& row) {
  std::vector<TileWork> lines = MaskLineTiles(layouts, parts);
  if (lines.empty()) return;
  kernels.push_back({row, AddTiles(std::move(lines)), {}});
  has_bool_masks = true;
}

// The arena's end, after the calls' tensors.
void LaunchPlan::AddConstants() {
  constants_begin = arena.bytes();
  if (counts_tiles) {
    taken_offset = arena.Add("taken", 2 * sizeof(uint32_t), RegionUse::kZeroed);
  }
  if (mapped) {
    maps_offset =
        arena.Add("maps", MapBytes(*mapped, static_cast<int64_t>(parts.size())), RegionUse::kInput);
  }
  for (CallLayout& layout : layouts) LayOutConstants(layout, arena);
  problems_offset = arena.Add(
      "problems", problem_count() * static_cast<int64_t>(sizeof(ProblemDesc)), RegionUse::kInput);
  for (const std::vector<TileWork>& own : tiles) {
    tile_offsets.push_back(
        arena.Add("tiles", static_cast<int64_t>(own.size() * sizeof(TileWork)), RegionUse::kInput));
  }
  if (dropout) {
    dropout->first_rounds_offset = arena.Add(
        "first_rounds", static_cast<int64_t>(dropout->parts.first_rounds.size() * sizeof(uint32_t)),
        RegionUse::kInput);
  }
}

void LaunchPlan::PlaceConstants(uint64_t arena_address, uint64_t address) {
  CHECK(constants_shift == 0);
  constants_shift = static_cast<int64_t>(address - arena_address) - constants_begin;
  CHECK(constants_shift >= 0);
  const auto shift = [this](int64_t& offset) {
    if (offset >= 0) offset += constants_shift;
  };
  shift(taken_offset);
  shift(maps_offset);
  shift(problems_offset);
  for (int64_t& offset : tile_offsets) shift(offset);
  if (dropout) shift(dropout->first_rounds_offset);
  for (CallLayout& layout : layouts) {
    for (int64_t* offset : {&layout.alibi, &layout.sink, &layout.sequences}) shift(*offset);
  }
}

Travel TravelOf(const KernelRow& row) {
  const bool as_halves =
      row.element == ElementType::kFloat16 || row.architecture == Architecture::kSm70;
  return as_halves ? Travel::kAsHalves : Travel::kAsItIs;
}

MaskTiling TilingOf(const ForwardKernels& kernels) {
  const KernelRow& row = kernels.forward;
  return {row.tile.q_rows, row.tile.kv_rows, /*by_keys=*/false, InfoOf(row.architecture).lanes};
}
MaskTiling TilingOf(const BackwardKernels& kernels) {
  const KernelRow& row = kernels.backward;
  return {row.small ? row.tile.q_rows : kDqBlockRows, row.tile.kv_rows, /*by_keys=*/true,
          InfoOf(row.architecture).lanes};
}

namespace {

// `lay_out(problem, its number, plan)` gives the layout of a call's tensors.
template <class LayOut>
LaunchPlan PlanForwardWith(absl::Span<const Problem* const> problems, const ForwardKernels& kernels,
                           absl::Span<const CallMask> masks, const LayOut& lay_out) {
  LaunchPlan plan;
  plan.AddParts(problems, TravelOf(kernels.forward), masks);
  for (size_t n = 0; n < problems.size(); ++n) {
    plan.held.emplace_back();
    plan.layouts.push_back(lay_out(*problems[n], n, plan));
    if (!masks.empty()) plan.layouts[n].classes = masks[n].classes;
    LayOutTileLists(plan.layouts[n], TilingOf(kernels), MaskOf(masks, n), plan.arena);
    if (!IsCounted(masks, n)) plan.flops += Flops(*problems[n], Direction::kForward);
  }
  plan.AddMaskTiles(kernels.mask_tiles);
  AddMaps(kernels.forward, plan);
  const Tile& tile = kernels.forward.tile;
  const std::vector<size_t> first_runs =
      plan.AddRuns(problems, masks, Direction::kForward, tile.q_rows);
  OrderedTiles ordered = ForwardTiles(problems, plan.parts, tile, masks, first_runs);
  std::vector<TileWork> merged = std::move(ordered.merged);
  if (kernels.dropout_bits) {
    plan.AddDropout(*kernels.dropout_bits, ForwardRound(tile), ordered.work);
  }
  AddMain(
      kernels.forward, std::move(ordered), tile.q_rows, masks,
      [](const Problem& p) { return ScoreFlops(p, Direction::kForward); }, plan);
  plan.AddMerging(kernels.merge, std::move(merged));
  std::vector<TileWork> kept = KeepRowsTiles(plan.layouts, plan.parts);
  if (!kept.empty()) {
    CHECK(kernels.keep_rows.has_value());
    plan.kernels.push_back({*kernels.keep_rows, plan.AddTiles(std::move(kept)), {}});
  }
  plan.AddConstants();
  return plan;
}

template <class LayOut>
LaunchPlan PlanBackwardWith(absl::Span<const Problem* const> problems,
                            const BackwardKernels& kernels, absl::Span<const CallMask> masks,
                            const LayOut& lay_out) {
  LaunchPlan plan;
  plan.AddParts(problems, TravelOf(kernels.backward), masks);
  const Tile& tile = kernels.backward.tile;
  const std::vector<size_t> first_runs =
      plan.AddRuns(problems, masks, Direction::kBackward, tile.kv_rows);
  OrderedTiles ordered = BackwardTiles(problems, plan.parts, tile, masks, first_runs);
  std::vector<TileWork> merged = std::move(ordered.merged);
  // Where no call has keys, its kernel does not run.
  const bool zeroes_sums = ZeroesSums(kernels.backward) && !ordered.tiles.empty();
  for (size_t n = 0; n < problems.size(); ++n) {
    plan.held.emplace_back();
    plan.layouts.push_back(lay_out(*problems[n], n, plan));
    if (!masks.empty()) plan.layouts[n].classes = masks[n].classes;
    LayOutTileLists(plan.layouts[n], TilingOf(kernels), MaskOf(masks, n), plan.arena);
    LayOutGradients(plan.layouts[n], SumsOf(*problems[n], kernels, !zeroes_sums), plan.arena);
    if (!IsCounted(masks, n)) plan.flops += Flops(*problems[n], Direction::kBackward);
  }
  plan.AddMaskTiles(kernels.mask_tiles);
  AddMaps(kernels.backward, plan);
  const size_t rows = plan.AddTiles(RowBlockTiles(problems, plan.parts));
  if (zeroes_sums) plan.row_tiles = rows;
  plan.kernels.push_back({kernels.key_bounds, rows, {}});
  plan.kernels.push_back({kernels.delta, rows, {}});
  if (kernels.dropout_bits) {
    plan.AddDropout(*kernels.dropout_bits, BackwardRound(tile), ordered.work);
  }
  AddMain(
      kernels.backward, std::move(ordered), tile.kv_rows, masks,
      [](const Problem& p) { return ScoreFlops(p, Direction::kBackward); }, plan);
  plan.kernels.push_back({kernels.query_gradient, rows, {}});  // it may overlap backward
  plan.AddMerging(kernels.merge, std::move(merged));
  if (kernels.sink_gradient) {
    plan.kernels.push_back(
        {*kernels.sink_gradient, plan.AddTiles(HeadTiles(problems, plan.parts)), {}});
  }
  if (kernels.bias_gradient) {
    plan.kernels.push_back(
        {*kernels.bias_gradient, plan.AddTiles(BiasTiles(problems, plan.parts)), {}});
  }
  plan.AddConstants();
  return plan;
}

}  // namespace

LaunchPlan PlanForward(absl::Span<const Problem* const> problems, const ForwardKernels& kernels,
                       const std::vector<bool>& held, absl::Span<const CallMask> masks) {
  const Travel travel = TravelOf(kernels.forward);
  return PlanForwardWith(problems, kernels, masks, [&](const Problem& p, size_t n, LaunchPlan& to) {
    return held[n] ? LayOutKeptTensors(p, to.held[n], to.arena, travel)
                   : LayOutTensors(p, RegionUse::kOutput, to.arena, travel);
  });
}

LaunchPlan PlanBackward(absl::Span<const Problem* const> problems, const BackwardKernels& kernels,
                        const std::vector<bool>& held, absl::Span<const CallMask> masks) {
  const Travel travel = TravelOf(kernels.backward);
  return PlanBackwardWith(
      problems, kernels, masks, [&](const Problem& p, size_t n, LaunchPlan& to) {
        return LayOutTensors(p, RegionUse::kInput, held[n] ? to.held[n] : to.arena, travel);
      });
}

LaunchPlan PlanForwardElsewhere(const Problem& problem, const ForwardKernels& kernels,
                                absl::Span<const CallMask> masks) {
  const Problem* const problems[] = {&problem};
  return PlanForwardWith(problems, kernels, masks, [&](const Problem& p, size_t, LaunchPlan& to) {
    return LayOutElsewhere(p, to.arena, TravelOf(kernels.forward));
  });
}

LaunchPlan PlanBackwardElsewhere(const Problem& problem, const BackwardKernels& kernels,
                                 absl::Span<const CallMask> masks) {
  const Problem* const problems[] = {&problem};
  return PlanBackwardWith(problems, kernels, masks, [&](const Problem& p, size_t, LaunchPlan& to) {
    return LayOutElsewhere(p, to.arena, TravelOf(kernels.backward));
  });
}

absl::StatusOr<std::vector<std::byte>> LaunchPlan::Constants(uint64_t arena_address,
                                                             const KernelDevice& device) const {
  std::vector<std::byte> image(static_cast<size_t>(arena.bytes() - constants_begin));
  auto put = [&](int64_t offset, const void* from, size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(image.data() + (offset - constants_shift - constants_begin), from, bytes);
  };
  for (const CallLayout& at : layouts) {
    const Problem& p = *at.problem;
    if (at.alibi >= 0) put(at.alibi, p.alibi_slopes.data(), p.alibi_slopes.size() * 4);
    if (at.sink >= 0) put(at.sink, p.sink_logits.data(), p.sink_logits.size() * 4);
    const std::vector<SequenceDesc> sequences = SequencesOf(p, at.travel, at.classes);
    put(at.sequences, sequences.data(), sequences.size() * sizeof(SequenceDesc));
  }
  std::vector<ProblemDesc> described;
  described.reserve(static_cast<size_t>(problem_count()));
  for (size_t n = 0; n < parts.size(); ++n) {
    ProblemDesc desc = Describe(layouts[parts[n].call], parts[n], arena_address);
    if (mapped) {
      const int64_t offset = maps_offset + MapBytes(*mapped, static_cast<int64_t>(n));
      desc.maps = reinterpret_cast<const TensorMap*>(arena_address + offset);
      for (int map = 0; map < mapped->maps; ++map) {
        ASSIGN_OR_RETURN(const TensorMap encoded,
                         device.Encode(BoxOf(*layouts[parts[n].call].problem, parts[n], desc, map,
                                             BoxRows(*mapped, map))));
        put(offset + static_cast<int64_t>(map * sizeof(encoded)), &encoded, sizeof(encoded));
      }
    }
    described.push_back(desc);
  }
  for (const CutLine& line : cut_lines) {
    const Part& part = parts[line.part];
    const RunShape shape =
        RunShapeOf(*layouts[part.call].problem, direction, part.batches, part.kv_heads, cut_rows);
    for (int32_t run = 0; run < kListRuns; ++run) {
      const ProblemDesc& whole = described[line.part];
      described.push_back(DescribeRun(whole, line, shape, direction, run, arena_address));
    }
  }
  put(problems_offset, described.data(), described.size() * sizeof(ProblemDesc));
  for (size_t n = 0; n < tiles.size(); ++n) {
    put(tile_offsets[n], tiles[n].data(), tiles[n].size() * sizeof(TileWork));
  }
  if (dropout) {
    const std::vector<uint32_t>& first_rounds = dropout->parts.first_rounds;
    put(dropout->first_rounds_offset, first_rounds.data(), first_rounds.size() * sizeof(uint32_t));
  }
  return image;
}

KernelStep LaunchPlan::StepOf(uint64_t arena_address, const KernelRow& row, size_t list,
                              int64_t begin, int64_t end) const {
  LaunchParams params = {};
  params.problems = reinterpret_cast<const ProblemDesc*>(arena_address + problems_offset);
  params.tiles = reinterpret_cast<const TileWork*>(arena_address + tile_offsets[list]) + begin;
  params.tile_count = static_cast<int32_t>(end - begin);
  return {row, params};
}

const PlannedKernel& LaunchPlan::main() const {
  return *std::find_if(kernels.begin(), kernels.end(),
                       [](const PlannedKernel& kernel) { return !kernel.work.empty(); });
}

void LaunchPlan::Cut(int most, int64_t least) {
  const std::vector<int64_t>& work = main().work;
  const auto tile_count = static_cast<int64_t>(work.size()) - 1;
  cuts.clear();
  for (int slice = 0; slice < most - 1; ++slice) {
    const int64_t begin = cuts.empty() ? 0 : cuts.back();
    const int64_t end = std::max(EndOfSlice(work, slice, most), begin + least);
    if (end >= tile_count) return;
    cuts.push_back(end);
  }
}

std::vector<KernelStep> LaunchPlan::Slice(uint64_t arena_address, int slice) const {
  std::vector<KernelStep> steps;
  bool before_main = true;
  for (const PlannedKernel& kernel : kernels) {
    int64_t begin = 0, end = static_cast<int64_t>(tiles[kernel.tiles].size());
    if (!kernel.work.empty()) {
      before_main = false;
      if (slice > 0) begin = cuts[static_cast<size_t>(slice) - 1];
      if (slice < slices() - 1) end = cuts[static_cast<size_t>(slice)];
      AddMainSteps(arena_address, kernel, begin, end, steps);
    } else if (slice == (before_main ? 0 : slices() - 1) && begin < end) {
      steps.push_back(StepOf(arena_address, kernel.row, kernel.tiles, begin, end));
    }
  }
  return steps;
}

void LaunchPlan::AddMainSteps(uint64_t arena_address, const PlannedKernel& kernel, int64_t begin,
                              int64_t end, std::vector<KernelStep>& steps) const {
  for (int64_t next = end; begin < end; begin = next) {
    if (dropout) {
      const std::vector<int64_t>& ends = dropout->parts.ends;
      next = std::min(end, *std::upper_bound(ends.begin(), ends.end(), begin));
    }
    KernelStep main = StepOf(arena_address, kernel.row, kernel.tiles, begin, next);
    LaunchParams& params = main.params;
    if (dropout) {
      params.dropout_bits = reinterpret_cast<uint32_t*>(arena_address + dropout->bits_offset);
      params.first_rounds =
          reinterpret_cast<const uint32_t*>(arena_address + dropout->first_rounds_offset) + begin;
      steps.push_back({dropout->row, params});
    }
    if (kernel.row.stays) {
      params.taken = reinterpret_cast<uint32_t*>(arena_address + taken_offset);
      params.taken_before = static_cast<uint32_t>(begin);
    }
    if (row_tiles) {
      params.row_tiles =
          reinterpret_cast<const TileWork*>(arena_address + tile_offsets[*row_tiles]);
      params.row_tile_count = static_cast<int32_t>(tiles[*row_tiles].size());
    }
    steps.push_back(main);
  }
}

int64_t ResidualTensorBytes(const Problem& p) {
  ArenaLayout arena;
  LayOutTensors(p, RegionUse::kOutput, arena);
  return arena.bytes();
}

namespace {

// `layout`: of the tensors, in `arena`.
int64_t ForwardBytes(CallLayout layout, ArenaLayout arena, const ForwardKernels& kernels,
                     const CallMask* mask) {
  const Problem& p = *layout.problem;
  const Travel travel = TravelOf(kernels.forward);
  LayOutTileLists(layout, TilingOf(kernels), mask, arena);
  LayOutConstants(layout, arena);
  const int64_t parts = PartCount(p, travel, layout.classes);
  const Tile& tile = kernels.forward.tile;
  const int64_t row_tiles = p.q_heads * TilesOfHead(p, p.q_len, tile.q_rows, layout);
  const int64_t tiles = row_tiles + MaskLineCount(layout);
  const int64_t maps =
      kernels.forward.stays ? MapBytes(kernels.forward, parts) + kRegionAlignment : 0;
  int64_t bytes = arena.bytes() + ConstantBytes(parts, tiles, 3) + maps +
                  RunBytesOf(p, Direction::kForward, parts, tile.q_rows, mask);
  if (kernels.dropout_bits) {
    bytes += DropoutBytesOf(layout, row_tiles, p.MaxKeyLength(), 1, ForwardRound(tile));
  }
  return bytes;
}

int64_t BackwardBytes(CallLayout layout, ArenaLayout arena, const BackwardKernels& kernels,
                      const CallMask* mask) {
  const Problem& p = *layout.problem;
  const Travel travel = TravelOf(kernels.backward);
  LayOutTileLists(layout, TilingOf(kernels), mask, arena);
  LayOutGradients(layout, SumsOf(p, kernels, !ZeroesSums(kernels.backward)), arena);
  LayOutConstants(layout, arena);
  const int64_t parts = PartCount(p, travel, layout.classes);
  const int64_t key_tiles =
      p.kv_heads * TilesOfHead(p, p.kv_len, kernels.backward.tile.kv_rows, layout);
  int64_t tiles =
      p.q_heads * TilesOfHead(p, p.q_len, kDqBlockRows, layout) + key_tiles + MaskLineCount(layout);
  if (kernels.sink_gradient) tiles += p.batch * p.q_heads;
  if (kernels.bias_gradient) {
    const BroadcastShape& shape = p.bias->shape;
    tiles += shape.batch * shape.heads * ((shape.rows + 15) / 16) * ((shape.columns + 15) / 16);
  }
  const int64_t maps =
      kernels.backward.maps > 0 ? MapBytes(kernels.backward, parts) + kRegionAlignment : 0;
  int64_t bytes = arena.bytes() + ConstantBytes(parts, tiles, 5) + maps +
                  RunBytesOf(p, Direction::kBackward, parts, kernels.backward.tile.kv_rows, mask);
  if (kernels.dropout_bits) {
    bytes += DropoutBytesOf(layout, key_tiles, p.MaxQueryLength(), p.group_size(),
                            BackwardRound(kernels.backward.tile));
  }
  return bytes;
}

}  // namespace

int64_t ForwardArenaBytes(const Problem& p, const ForwardKernels& kernels, const CallMask* mask) {
  ArenaLayout arena;
  CallLayout layout = LayOutTensors(p, RegionUse::kOutput, arena, TravelOf(kernels.forward));
  layout.classes = ClassesOf(mask);
  return ForwardBytes(layout, std::move(arena), kernels, mask);
}

int64_t ForwardBytesElsewhere(const Problem& p, const ForwardKernels& kernels) {
  ArenaLayout arena;
  const CallLayout layout = LayOutElsewhere(p, arena, TravelOf(kernels.forward));
  return ForwardBytes(layout, std::move(arena), kernels, nullptr);
}

int64_t KeptForwardBytes(const Problem& p, Travel travel, const Classes& classes) {
  ArenaLayout arena;
  CallLayout layout = LayOutKeptTensors(p, arena, arena, travel);
  if (!layout.keeps_rows) return 0;
  layout.classes = classes;
  const int64_t tiles = p.q_heads * TilesOfHead(p, p.q_len, kDqBlockRows, layout) +
                        p.kv_heads * TilesOfHead(p, p.kv_len, kDqBlockRows, layout);
  return arena.bytes() - ResidualTensorBytes(p) +
         RoundUp(tiles * static_cast<int64_t>(sizeof(TileWork)), kRegionAlignment);
}

int64_t BackwardArenaBytes(const Problem& p, const BackwardKernels& kernels, const CallMask* mask) {
  ArenaLayout arena;
  CallLayout layout = LayOutTensors(p, RegionUse::kInput, arena, TravelOf(kernels.backward));
  layout.classes = ClassesOf(mask);
  return BackwardBytes(layout, std::move(arena), kernels, mask);
}

int64_t BackwardBytesElsewhere(const Problem& p, const BackwardKernels& kernels) {
  ArenaLayout arena;
  const CallLayout layout = LayOutElsewhere(p, arena, TravelOf(kernels.backward));
  return BackwardBytes(layout, std::move(arena), kernels, nullptr);
}

}  // namespace attnd::cuda
