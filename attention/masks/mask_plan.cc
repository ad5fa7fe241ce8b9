#include "attention/masks/mask_plan.h"

#include <algorithm>

namespace attnd {

int64_t MaskPlan::bitmap_count() const {
  const int64_t words = int64_t{tile.rows} * words_per_row;
  return words == 0 ? 0 : static_cast<int64_t>(bitmaps.size()) / words;
}

absl::Span<const uint32_t> MaskPlan::Bitmap(uint32_t number) const {
  const int64_t words = int64_t{tile.rows} * words_per_row;
  return absl::MakeConstSpan(bitmaps).subspan(static_cast<size_t>(number * words),
                                              static_cast<size_t>(words));
}

int64_t MaskPlan::bytes() const {
  return static_cast<int64_t>(sizeof(*this) + (bitmaps.size() + row_keys.size()) * 4) +
         by_rows.bytes() + by_keys.bytes();
}

int64_t MaskPlan::CountVisible(int64_t row, int64_t begin, int64_t end) const {
  const absl::Span<const MaskTile> line = by_rows.Line(row / tile.rows);
  const auto first = std::partition_point(line.begin(), line.end(), [&](const MaskTile& t) {
    return (int64_t{t.tile} + 1) * tile.keys <= begin;
  });
  int64_t visible = 0;
  for (auto t = first; t != line.end() && int64_t{t->tile} * tile.keys < end; ++t) {
    const int64_t key = int64_t{t->tile} * tile.keys;
    const int64_t from = std::max(begin, key) - key;
    const int64_t to = std::min({end, keys, key + tile.keys}) - key;
    if (t->is_full()) {
      visible += std::max<int64_t>(0, to - from);
      continue;
    }
    const uint32_t* words = Bitmap(t->bitmap).data() + row % tile.rows * words_per_row;
    for (int64_t word = from / 32; word * 32 < to; ++word) {
      uint32_t bits = words[word];
      if (from > word * 32) bits &= ~uint32_t{0} << (from - word * 32);
      if (to < (word + 1) * 32) bits &= ~uint32_t{0} >> ((word + 1) * 32 - to);
      visible += __builtin_popcount(bits);
    }
  }
  return visible;
}

}  // namespace attnd
