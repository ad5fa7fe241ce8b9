#include "kernels/cuda/masks/mask_layout.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/rules/mask_words.h"

namespace attnd::cuda {
namespace {

int64_t Tiles(int64_t length, int64_t size) { return (length + size - 1) / size; }

TileLists ListsOf(const MaskTiling& tiling) {
  TileLists lists = {};
  lists.tile_rows = tiling.rows;
  lists.tile_keys = tiling.keys;
  lists.by_keys = tiling.by_keys;
  lists.lanes = tiling.lanes;
  return lists;
}

struct Counts {
  int64_t lines = 0, tiles = 0, bitmaps = 0, plans_of = 0;
};
void Place(const Counts& counts, MaskLayout& layout) {
  const int64_t words = BitmapWords(layout.lists.tile_rows, layout.lists.tile_keys);
  auto add = [&layout](int64_t bytes) {
    const int64_t at = layout.bytes;
    layout.bytes += RoundUp(bytes, kRegionAlignment);
    return at;
  };
  layout.lines = add(counts.lines * int64_t{sizeof(MaskLine)});
  layout.tiles = add(counts.tiles * 4);
  layout.bitmaps = add(counts.bitmaps * words * 4);
  if (counts.plans_of > 0) layout.plan_of = add(counts.plans_of * 4);
}

// The lists that a kernel of these reads.
const MaskLists& SideOf(const MaskPlan& plan, const TileLists& lists) {
  return lists.by_keys ? plan.by_keys : plan.by_rows;
}

// Bitmaps in the order of lanes, from rows of bits.
void WriteBitmaps(const MaskPlan& plan, const TileLists& lists, uint32_t* to) {
  const int squares = plan.tile.keys / kMaskSquare;
  for (int64_t n = 0; n < plan.bitmap_count(); ++n) {
    const absl::Span<const uint32_t> rows = plan.Bitmap(static_cast<uint32_t>(n));
    for (int square = 0; square < plan.tile.rows / kMaskSquare * squares; ++square) {
      const size_t first = static_cast<size_t>(square / squares * kMaskSquare * squares);
      const auto keys_of = [&](int row) {
        return rows[first + static_cast<size_t>(row * squares + square % squares)];
      };
      for (int lane = 0; lane < 32; ++lane) {
        *to++ = lists.by_keys ? MaskWord::FromColumns(lists.lanes, lane, keys_of)
                              : MaskWord::FromRows(lists.lanes, lane, keys_of);
      }
    }
  }
}

}  // namespace

MaskCompileOptions OptionsOf(const MaskTiling& tiling) {
  return {.tile = {.rows = tiling.rows, .keys = tiling.keys},
          .by_rows = !tiling.by_keys,
          .by_keys = tiling.by_keys};
}

MaskLayout LayOutBoolMask(const BroadcastShape& mask, const MaskTiling& tiling) {
  MaskLayout layout = {.lists = ListsOf(tiling)};
  int64_t lines = Tiles(mask.rows, tiling.rows), tiles = Tiles(mask.columns, tiling.keys);
  if (tiling.by_keys) std::swap(lines, tiles);
  layout.lists.plan_lines = static_cast<int32_t>(lines);
  layout.lists.line_tiles = static_cast<int32_t>(tiles);
  layout.lists.head = mask.heads == 1 ? 0 : 1;
  layout.lists.batch = mask.batch == 1 ? 0 : mask.heads;
  const int64_t all_lines = mask.batch * mask.heads * lines;
  Place({.lines = all_lines, .tiles = all_lines * tiles, .bitmaps = all_lines * tiles}, layout);
  return layout;
}

MaskLayout LayOutMask(const CompiledMask& compiled, const Problem& p, const MaskTiling& tiling) {
  MaskLayout layout = {.lists = ListsOf(tiling)};
  Counts counts;
  int64_t plan_lines = 0;
  for (const MaskPlan& plan : compiled.plans()) {
    const MaskLists& side = SideOf(plan, layout.lists);
    plan_lines = side.lines();
    counts.lines += plan_lines;
    counts.tiles += static_cast<int64_t>(side.tiles.size());
    counts.bitmaps += plan.bitmap_count();
  }
  layout.lists.plan_lines = static_cast<int32_t>(plan_lines);
  const int64_t batches = compiled.varies_by_batch() ? p.batch : 1;
  const int64_t heads = compiled.varies_by_head() ? p.q_heads : 1;
  layout.lists.head = heads == 1 ? 0 : 1;
  layout.lists.batch = batches == 1 ? 0 : heads;
  if (batches * heads > 1) counts.plans_of = batches * heads;
  Place(counts, layout);
  return layout;
}

absl::Status CheckMask(const CompiledMask& compiled) {
  for (const MaskPlan& plan : compiled.plans()) {
    if (plan.bitmap_count() <= kMaxListedBitmaps) continue;
    return absl::UnimplementedError(
        absl::StrCat("problem.mask: the cuda engine takes at most ", kMaxListedBitmaps,
                     " different tiles of ", plan.tile.rows, " rows and ", plan.tile.keys,
                     " keys, got ", plan.bitmap_count(), "; use the cpu engine"));
  }
  return absl::OkStatus();
}

std::vector<std::byte> MaskImage(const CompiledMask& compiled, const Problem& p,
                                 const MaskLayout& layout) {
  std::vector<std::byte> image(static_cast<size_t>(layout.bytes));
  auto* lines = reinterpret_cast<MaskLine*>(image.data() + layout.lines);
  auto* tiles = reinterpret_cast<uint32_t*>(image.data() + layout.tiles);
  auto* bitmaps = reinterpret_cast<uint32_t*>(image.data() + layout.bitmaps);
  uint32_t listed = 0, bitmap = 0;
  for (const MaskPlan& plan : compiled.plans()) {
    const MaskLists& side = SideOf(plan, layout.lists);
    for (int64_t n = 0; n < side.lines(); ++n) {
      *lines++ = {listed + side.offsets[static_cast<size_t>(n)],
                  listed + side.offsets[static_cast<size_t>(n) + 1], bitmap, 0};
    }
    for (const MaskTile& tile : side.tiles) {
      *tiles++ = tile.tile | (tile.is_full() ? 0 : (tile.bitmap + 1) << kListedTileBits);
    }
    WriteBitmaps(plan, layout.lists,
                 bitmaps + int64_t{bitmap} * BitmapWords(plan.tile.rows, plan.tile.keys));
    listed += static_cast<uint32_t>(side.tiles.size());
    bitmap += static_cast<uint32_t>(plan.bitmap_count());
  }
  if (layout.plan_of >= 0) {
    auto* plan_of = reinterpret_cast<uint32_t*>(image.data() + layout.plan_of);
    for (int64_t b = 0; b < (compiled.varies_by_batch() ? p.batch : 1); ++b) {
      for (int64_t h = 0; h < (compiled.varies_by_head() ? p.q_heads : 1); ++h) {
        *plan_of++ = static_cast<uint32_t>(compiled.PlanIndex(b, h));
      }
    }
  }
  return image;
}

TileLists ListsAt(const MaskLayout& layout, uint64_t address, int64_t entry, int64_t q_head) {
  TileLists lists = layout.lists;
  auto at = [address](int64_t offset) { return address + static_cast<uint64_t>(offset); };
  lists.lines = reinterpret_cast<MaskLine*>(at(layout.lines));
  lists.tiles = reinterpret_cast<uint32_t*>(at(layout.tiles));
  lists.bitmaps = reinterpret_cast<uint32_t*>(at(layout.bitmaps));
  const int64_t first = entry * lists.batch + q_head * lists.head;
  if (layout.plan_of >= 0) {
    lists.plan_of = reinterpret_cast<const uint32_t*>(at(layout.plan_of)) + first;
  } else {
    // A bool mask's: numbers count from what this part begins with.
    const int64_t line = first * lists.plan_lines, tile = line * lists.line_tiles;
    lists.lines += line;
    lists.tiles += tile;
    lists.bitmaps += tile * BitmapWords(lists.tile_rows, lists.tile_keys);
  }
  return lists;
}

}  // namespace attnd::cuda
