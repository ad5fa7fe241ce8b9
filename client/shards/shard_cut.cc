#include "client/shards/shard_cut.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "attention/residue_classes.h"
#include "attention/score_rule.h"
#include "base/round_up.h"

namespace attnd {
namespace {

constexpr int64_t kUnbounded = 1 << 29;  // beyond any key, and int holds sums of a few

int64_t RoundDown(int64_t value, int64_t step) { return value / step * step; }

Visibility VisibilityOf(const Problem& p, const Sequence& s) {
  auto bounded = [](int64_t key) {
    return static_cast<int>(std::clamp(key, -kUnbounded, kUnbounded));
  };
  int64_t right = p.window_right >= 0 ? s.offset + p.window_right : kUnbounded;
  if (p.causal) right = std::min(right, s.offset);
  return {.q_len = static_cast<int>(s.q_len),
          .kv_len = static_cast<int>(s.kv_len),
          .low = bounded(p.window_left >= 0 ? s.offset - p.window_left : -kUnbounded),
          .high = bounded(right)};
}

// The diagonal of any piece must be one that the wire can say.
bool OffsetsFit(const Sequence& s) {
  return s.offset + s.q_len <= kMaxLength && s.offset - s.kv_len >= -kMaxLength;
}

ShardRange Piece(const ShardRange& range, Cut cut, Range rows, Range keys) {
  ShardRange piece = range;
  piece.cut = cut;
  piece.row_begin = rows.begin;
  piece.row_count = rows.end - rows.begin;
  if (keys.begin >= keys.end) return piece;  // without keys: nothing is visible
  piece.key_begin = keys.begin;
  piece.key_count = keys.end - keys.begin;
  return piece;
}

// Engines may take a strided mask by residue classes, each with tiles of its own: pieces then begin
// where those of every class do.
CutSteps OfClasses(const Problem& p, CutSteps steps) {
  if (p.mask == nullptr) return steps;
  const absl::StatusOr<ResidueClasses> classes = ResidueClassesOf(p);
  if (!classes.ok()) return steps;
  return {.rows = steps.rows * classes->p, .keys = steps.keys * classes->p};
}

// [begin, end) from a step's beginning on.
Range FromStep(Range range, int64_t step) {
  return {static_cast<int>(RoundDown(range.begin, step)), range.end};
}

// Ends, at steps, of at most `pieces` ranges of rows that see about as many keys. A row itself
// counts as a key.
std::vector<int64_t> RowEnds(const Visibility& visible, int64_t q_len, int64_t pieces,
                             int64_t step) {
  std::vector<int64_t> seen = {0};  // up to each step
  for (int64_t row = 0; row < q_len; row += step) {
    const int64_t rows = std::min(step, q_len - row);
    const int middle = static_cast<int>(row + rows / 2);
    const Range keys = VisibleKeys(visible, middle, middle + 1);
    seen.push_back(seen.back() + rows * (1 + std::max(keys.end - keys.begin, 0)));
  }
  std::vector<int64_t> ends;
  for (int64_t piece = 1; piece <= pieces; ++piece) {
    const int64_t share = seen.back() / pieces * piece;
    auto at = std::lower_bound(seen.begin(), seen.end(), share);
    if (at != seen.begin() && share - *std::prev(at) < *at - share) --at;
    const int64_t end = piece == pieces ? q_len : std::min((at - seen.begin()) * step, q_len);
    if (end > (ends.empty() ? 0 : ends.back())) ends.push_back(end);
  }
  return ends;
}

std::vector<ShardRange> CutRows(const Problem& p, const ShardRange& range, const Sequence& s,
                                int64_t pieces, const CutSteps& steps) {
  const Visibility visible = VisibilityOf(p, s);
  std::vector<ShardRange> shards;
  int64_t begin = 0;
  for (const int64_t end : RowEnds(visible, s.q_len, pieces, steps.rows)) {
    const Range rows{static_cast<int>(std::exchange(begin, end)), static_cast<int>(end)};
    // Keys that no row sees count in the denominator of zero_rest.
    Range keys{0, static_cast<int>(s.kv_len)};
    if (p.denominator != DenominatorKind::kZeroRest) {
      keys = FromStep(VisibleKeys(visible, rows.begin, rows.end), steps.keys);
    }
    shards.push_back(Piece(range, Cut::kRows, rows, keys));
  }
  return shards;
}

std::vector<ShardRange> CutKeys(const Problem& p, const ShardRange& range, const Sequence& s,
                                int64_t pieces, const CutSteps& steps) {
  const Visibility visible = VisibilityOf(p, s);
  const int64_t each = RoundUp((s.kv_len + pieces - 1) / pieces, steps.keys);
  std::vector<ShardRange> shards;
  for (int64_t key = 0; key < s.kv_len; key += each) {
    Range keys{static_cast<int>(key), static_cast<int>(std::min(key + each, s.kv_len))};
    Range rows = FromStep(RowsThatSee(visible, keys.begin, keys.end), steps.rows);
    if (rows.begin < rows.end) shards.push_back(Piece(range, Cut::kKeys, rows, keys));
  }
  return shards;
}

}  // namespace

bool MayCut(const Problem& p, const ShardRange& range, Direction direction, Cut cut) {
  if (range.batch_count != 1 || range.cut != Cut::kNone || p.dropout.threshold != 0) return false;
  if (!OffsetsFit(p.SequenceAt(range.batch_begin))) return false;
  if (cut == Cut::kKeys) {
    return direction == Direction::kForward && p.denominator != DenominatorKind::kZeroRest;
  }
  return direction == Direction::kForward || !p.bias || !p.bias->want_gradient;
}

std::vector<ShardRange> CutShard(const Problem& p, const ShardRange& range, Cut cut, int64_t pieces,
                                 const CutSteps& each) {
  const Sequence sequence = p.SequenceAt(range.batch_begin);
  const CutSteps steps = OfClasses(p, each);
  std::vector<ShardRange> shards = cut == Cut::kRows ? CutRows(p, range, sequence, pieces, steps)
                                                     : CutKeys(p, range, sequence, pieces, steps);
  if (shards.empty()) shards.push_back(range);
  return shards;
}

}  // namespace attnd
