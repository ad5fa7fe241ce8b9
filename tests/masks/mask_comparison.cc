#include "tests/masks/mask_comparison.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_oracle.h"

namespace attnd {
namespace {

// Every score of one (b, h), row-major.
using Dense = std::vector<uint8_t>;

Dense DenseOf(const MaskOracle& oracle, const MaskCall& call, int64_t b, int64_t h) {
  Dense dense;
  for (int64_t i = 0; i < call.rows; ++i) {
    for (int64_t j = 0; j < call.keys; ++j) dense.push_back(oracle.IsVisible(b, h, i, j));
  }
  return dense;
}

int64_t Count(const Dense& dense, int64_t begin, int64_t end) {
  return std::count(dense.begin() + begin, dense.begin() + end, 1);
}

std::string CompareRuns(const Dense& dense, const MaskCall& call,
                        const std::vector<std::vector<KeyRun>>& runs) {
  Dense seen(dense.size());
  for (int64_t i = 0; i < call.rows; ++i) {
    int64_t end = -1;
    for (const KeyRun& run : runs[static_cast<size_t>(i)]) {
      if (run.begin <= end || run.begin >= run.end || run.end > call.keys) {
        return absl::StrCat("row ", i, ": run ", run.begin, "..", run.end, " after ", end);
      }
      end = run.end;
      for (int64_t j = run.begin; j < run.end; ++j)
        seen[static_cast<size_t>(i * call.keys + j)] = 1;
    }
  }
  return seen == dense ? "" : "runs";
}

// Marks what a plan's tile shows; a difference if a bit lies where no score is, or if the bitmap is
// empty or full.
std::string MarkTile(const MaskPlan& plan, int64_t row_tile, int64_t key_tile, uint32_t bitmap,
                     Dense& seen) {
  int64_t visible = 0, hidden = 0;
  for (int64_t r = 0; r < plan.tile.rows; ++r) {
    for (int64_t c = 0; c < plan.tile.keys; ++c) {
      const int64_t i = row_tile * plan.tile.rows + r, j = key_tile * plan.tile.keys + c;
      const bool exists = i < plan.rows && j < plan.keys;
      bool bit = exists;
      if (bitmap != kFullMaskTile) {
        bit =
            plan.Bitmap(bitmap)[static_cast<size_t>(r * plan.words_per_row + c / 32)] >> c % 32 & 1;
      }
      if (bit && !exists) return absl::StrCat("a bit beyond the end at ", i, ", ", j);
      if (bit) ++seen[static_cast<size_t>(i * plan.keys + j)];
      visible += bit;
      hidden += exists && !bit;
    }
  }
  if (bitmap == kFullMaskTile || (visible > 0 && hidden > 0)) return "";
  return absl::StrCat("bitmap ", bitmap, " is empty or full");
}

std::string CompareLists(const Dense& dense, const MaskPlan& plan, bool by_rows) {
  const MaskLists& lists = by_rows ? plan.by_rows : plan.by_keys;
  Dense seen(dense.size());
  for (int64_t line = 0; line < lists.lines(); ++line) {
    int64_t before = -1;
    for (const MaskTile& tile : lists.Line(line)) {
      if (int64_t{tile.tile} <= before) return absl::StrCat("line ", line, " does not ascend");
      before = tile.tile;
      const std::string wrong =
          MarkTile(plan, by_rows ? line : tile.tile, by_rows ? tile.tile : line, tile.bitmap, seen);
      if (!wrong.empty()) return wrong;
    }
  }
  return seen == dense ? "" : by_rows ? "lists by rows" : "lists by keys";
}

std::string CompareCounts(const Dense& dense, const MaskPlan& plan) {
  int64_t empty = 0, first_empty = -1;
  for (int64_t i = 0; i < plan.rows; ++i) {
    const int64_t row = i * plan.keys, visible = Count(dense, row, row + plan.keys);
    if (visible == 0 && empty++ == 0) first_empty = i;
    if (plan.row_keys[static_cast<size_t>(i)] != visible) return absl::StrCat("row_keys of ", i);
    const int64_t begin = (i * 7) % plan.keys, end = begin + (plan.keys - begin + 1) / 2;
    if (plan.CountVisible(i, begin, end) != Count(dense, row + begin, row + end)) {
      return absl::StrCat("CountVisible of ", i, ", ", begin, "..", end);
    }
  }
  if (plan.visible != Count(dense, 0, static_cast<int64_t>(dense.size()))) return "visible";
  if (plan.empty_rows != empty || plan.first_empty_row != first_empty) return "empty rows";
  const auto& tiles = plan.by_rows.tiles;
  const int64_t full = std::count_if(tiles.begin(), tiles.end(),
                                     [](const MaskTile& tile) { return tile.is_full(); });
  if (plan.full_tiles != full || plan.partial_tiles != static_cast<int64_t>(tiles.size()) - full) {
    return "numbers of tiles";
  }
  std::set<std::vector<uint32_t>> distinct;
  for (int64_t n = 0; n < plan.bitmap_count(); ++n) {
    const auto bitmap = plan.Bitmap(static_cast<uint32_t>(n));
    distinct.insert(std::vector<uint32_t>(bitmap.begin(), bitmap.end()));
  }
  return static_cast<int64_t>(distinct.size()) == plan.bitmap_count() ? "" : "a bitmap twice";
}

std::string ComparePlan(const Dense& dense, const MaskPlan& plan) {
  for (bool by_rows : {true, false}) {
    std::string wrong = CompareLists(dense, plan, by_rows);
    if (!wrong.empty()) return wrong;
  }
  return CompareCounts(dense, plan);
}

}  // namespace

std::string CompareWithOracle(const MaskSpec& spec, const MaskCall& call,
                              const std::vector<MaskTileSize>& tiles) {
  const auto mask = MaskDescription::Make(spec, call);
  if (!mask.ok()) return std::string(mask.status().message());
  const MaskDescription& description = **mask;
  MaskSpec canonical = description.spec();
  if (CanonicalMask(canonical) != canonical) return "the canonical form has another";
  canonical.origin = spec.origin;
  const MaskOracle oracle(spec, call), of_canonical(canonical, call);

  std::vector<CompiledMask> compiled;
  for (const MaskTileSize& tile : tiles) {
    auto one = CompiledMask::Make(description, spec.origin, call, {.tile = tile, .row_keys = true});
    if (!one.ok()) return std::string(one.status().message());
    compiled.push_back(*std::move(one));
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t h = 0; h < call.q_heads; ++h) {
      const std::string at = absl::StrCat("entry ", b, ", head ", h, ": ");
      const Dense dense = DenseOf(oracle, call, b, h);
      if (DenseOf(of_canonical, call, b, h) != dense) return at + "canonical form";
      const auto runs = MaskRuns(description, spec.origin, call, b, h, int64_t{1} << 30);
      if (!runs.ok()) return std::string(runs.status().message());
      std::string wrong = CompareRuns(dense, call, *runs);
      if (!wrong.empty()) return at + wrong;
      for (const CompiledMask& one : compiled) {
        const MaskPlan& plan = one.PlanAt(b, h);
        wrong = ComparePlan(dense, plan);
        if (!wrong.empty()) {
          return absl::StrCat(at, plan.tile.rows, "x", plan.tile.keys, ": ", wrong);
        }
      }
    }
  }
  return "";
}

std::string ComparePlanWithOracle(const MaskSpec& spec, const MaskCall& call, int64_t b, int64_t h,
                                  const MaskPlan& plan) {
  return ComparePlan(DenseOf(MaskOracle(spec, call), call, b, h), plan);
}

}  // namespace attnd
