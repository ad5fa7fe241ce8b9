// CompiledMask: a mask's tiles, ready for an engine. The mask is cut into tiles of rows × keys, and
// each tile that holds a visible score is listed: FULL, or with the number of its bitmap in a
// dictionary of the distinct ones. What an engine does not find listed it need not visit.
//
//   MaskDescription + origin + MaskCall + MaskCompileOptions → CompiledMask → one MaskPlan per (b,
//   h)
//
// A plan holds the pattern alone. Options of the call (causal, window, key lengths, lengths of
// packed sequences, bias) are no part of it: engines AND them at run time, so one plan serves every
// length. FULL means that every score that exists is visible: rows below MaskPlan::rows, keys below
// MaskPlan::keys. Bits beyond them are 0. An engine that reads whole tiles cuts by lengths itself.
//
// Heads and batch entries that see the same keys share a plan. Memory and work grow with the tiles
// that are listed and with the borders of what is visible, never with rows × keys. Work is
// estimated before it begins and counted while it is done.
// Immutable once made; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/masks/mask_description.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

struct MaskTileSize {
  int32_t rows = 0, keys = 0;  // 1..kMaxMaskTile each
  friend bool operator==(const MaskTileSize&, const MaskTileSize&) = default;
};
inline constexpr int32_t kMaxMaskTile = 1024;

inline constexpr uint32_t kFullMaskTile = 0xffffffff;

// A listed tile. Eight bytes, so that neither number can overflow.
struct MaskTile {
  uint32_t tile;    // by_rows: tile of keys; by_keys: tile of rows
  uint32_t bitmap;  // in MaskPlan::bitmaps, or kFullMaskTile
  bool is_full() const { return bitmap == kFullMaskTile; }
  friend bool operator==(const MaskTile&, const MaskTile&) = default;
};

// Line n lists tiles[offsets[n] .. offsets[n + 1]), ascending.
struct MaskLists {
  std::vector<uint32_t> offsets;  // [lines + 1]
  std::vector<MaskTile> tiles;
  int64_t lines() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t Visits(int64_t line) const { return offsets[line + 1] - offsets[line]; }
  absl::Span<const MaskTile> Line(int64_t line) const {
    return absl::MakeConstSpan(tiles).subspan(offsets[line], Visits(line));
  }
  int64_t bytes() const {
    return static_cast<int64_t>(offsets.size() * sizeof(uint32_t) +
                                tiles.size() * sizeof(MaskTile));
  }
};

struct MaskPlan {
  MaskTileSize tile;
  int64_t rows = 0, keys = 0;  // the call's
  MaskLists by_rows;           // lines are tiles of rows: forward
  MaskLists by_keys;           // lines are tiles of keys: backward; the same tiles and bitmaps
  // Distinct bitmaps of partial tiles, tile.rows · words_per_row words each: key c of row r is bit
  // c mod 32 of word r·words_per_row + c / 32.
  std::vector<uint32_t> bitmaps;
  int32_t words_per_row = 0;       // ⌈tile.keys / 32⌉
  std::vector<uint32_t> row_keys;  // [rows]: visible keys of each row; empty unless asked for
  int64_t visible = 0;             // (row, key) pairs
  int64_t full_tiles = 0, partial_tiles = 0;
  int64_t empty_rows = 0;
  int64_t first_empty_row = -1;  // −1: none

  int64_t bitmap_count() const;
  absl::Span<const uint32_t> Bitmap(uint32_t number) const;
  int64_t bytes() const;
  // Visible keys of `row` in [begin, end): what zero_rest and EmptyRow::kReject ask after options
  // have cut the row. Needs by_rows. O(tiles of the line in the range).
  int64_t CountVisible(int64_t row, int64_t begin, int64_t end) const;
};

struct MaskCompileOptions {
  MaskTileSize tile;
  bool by_rows = true, by_keys = true;
  bool row_keys = false;
  // Limits over all plans together. A step is one node of an expression on one rectangle, or one
  // row of it on one tile: about 5 to 10 ns.
  int64_t max_steps = int64_t{200} << 20;
  int64_t max_bytes = int64_t{256} << 20;
};

class CompiledMask {
 public:
  // Errors:
  //   InvalidArgument  ValidatePlace's; EmptyRow::kReject is the caller's to apply
  //   OutOfRange       "problem.mask.pattern[2]: expected at most ... steps to compile, got about
  //                    ...": by estimate within a millisecond, or when the count is reached.
  //                    Likewise of bytes.
  static absl::StatusOr<CompiledMask> Make(const MaskDescription& mask, const MaskOrigin& origin,
                                           const MaskCall& call, const MaskCompileOptions& options);

  const MaskPlan& PlanAt(int64_t b, int64_t h) const { return plans_[PlanIndex(b, h)]; }
  // Index into plans() of batch entry or sequence b and query head h.
  int64_t PlanIndex(int64_t b, int64_t h) const {
    return plan_of_[static_cast<size_t>(b * batch_stride_ + h * head_stride_)];
  }
  // Whether plans differ between batch entries, between heads: else one lookup serves all.
  bool varies_by_batch() const { return batch_stride_ != 0; }
  bool varies_by_head() const { return head_stride_ != 0; }
  const std::vector<MaskPlan>& plans() const { return plans_; }
  int64_t bytes() const { return bytes_; }
  int64_t steps() const { return steps_; }  // work done

 private:
  CompiledMask() = default;

  std::vector<MaskPlan> plans_;
  std::vector<uint32_t> plan_of_;
  int64_t batch_stride_ = 0, head_stride_ = 0;
  int64_t bytes_ = 0, steps_ = 0;
};

// Keys that row `row` of (b, h) sees, before the call's options: ascending runs [begin, end) that
// do not touch. For reports and tests; engines read plans.
struct KeyRun {
  int64_t begin, end;
  friend bool operator==(const KeyRun&, const KeyRun&) = default;
};
absl::StatusOr<std::vector<std::vector<KeyRun>>> MaskRuns(const MaskDescription& mask,
                                                          const MaskOrigin& origin,
                                                          const MaskCall& call, int64_t b,
                                                          int64_t h, int64_t max_steps);

}  // namespace attnd
