#include "client/cli/mask/mask_picture.h"

#include <png.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "attention/mask_plans.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

int64_t VisibleIn(const MaskPlan& plan, const MaskTile& tile, int64_t scores) {
  if (tile.is_full()) return scores;
  int64_t visible = 0;
  for (uint32_t word : plan.Bitmap(tile.bitmap)) visible += std::popcount(word);
  return visible;
}

}  // namespace

absl::StatusOr<MaskPicture> MaskPicture::Draw(const Problem& problem, int64_t most_rows,
                                              int64_t most_columns) {
  const int64_t all_rows = problem.MaxQueryLength(), all_keys = problem.MaxKeyLength();
  const auto tile_size = [](int64_t length, int64_t cells) {
    return static_cast<int32_t>(std::min<int64_t>(kMaxMaskTile, DivideUp(length, cells)));
  };
  const MaskTileSize tile = {tile_size(all_rows, most_rows), tile_size(all_keys, most_columns)};
  MaskPlans plans;
  ASSIGN_OR_RETURN(const auto compiled, plans.Get(problem, {.tile = tile, .by_keys = false}));
  const MaskPlan& plan = compiled->PlanAt(0, 0);
  // A cell is a tile, or several where tiles cannot be as large.
  const int64_t tile_rows = DivideUp(all_rows, tile.rows),
                each_row = DivideUp(tile_rows, most_rows);
  const int64_t tile_keys = DivideUp(all_keys, tile.keys),
                each_column = DivideUp(tile_keys, most_columns);
  MaskPicture picture(DivideUp(tile_rows, each_row), DivideUp(tile_keys, each_column));
  const int64_t cell_rows = each_row * tile.rows, cell_keys = each_column * tile.keys;
  const auto cut = [](int64_t at, int64_t size, int64_t all) { return std::min(size, all - at); };
  for (int64_t line = 0; line < tile_rows; ++line) {
    const int64_t row = line / each_row;
    for (const MaskTile& t : plan.by_rows.Line(line)) {
      const int64_t column = t.tile / each_column;
      const int64_t scores = cut(line * tile.rows, tile.rows, all_rows) *
                             cut(int64_t{t.tile} * tile.keys, tile.keys, all_keys);
      const int64_t of_cell =
          cut(row * cell_rows, cell_rows, all_rows) * cut(column * cell_keys, cell_keys, all_keys);
      picture.shares_[row * picture.columns_ + column] +=
          static_cast<double>(VisibleIn(plan, t, scores)) / static_cast<double>(of_cell);
    }
  }
  return picture;
}

std::string MaskPicture::Text() const {
  constexpr double kAll = 1 - 1e-9;  // a sum of shares
  std::string text;
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      const double share = Share(row, column);
      text += share == 0 ? '.' : share > kAll ? '#' : '+';
    }
    text += '\n';
  }
  return text;
}

absl::Status MaskPicture::WritePng(const std::string& path) const {
  std::vector<uint8_t> pixels;
  for (double share : shares_) {
    pixels.push_back(static_cast<uint8_t>(std::lround(255 * (1 - std::min(share, 1.0)))));
  }
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(columns_);
  image.height = static_cast<png_uint_32>(rows_);
  image.format = PNG_FORMAT_GRAY;
  if (png_image_write_to_file(&image, path.c_str(), 0, pixels.data(), 0, nullptr) != 0) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("--png: cannot write ", path, ": ", image.message));
}

}  // namespace attnd
