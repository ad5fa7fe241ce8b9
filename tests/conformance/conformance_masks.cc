#include "tests/conformance/conformance_masks.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "attention/problem.h"
#include "base/check.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

MaskExpr Band() { return Window(9, 9); }

// A number below `most` that looks drawn, for lists.
uint32_t Drawn(int64_t n, uint32_t most) {
  return static_cast<uint32_t>((static_cast<uint64_t>(n) * 2654435761u >> 7) % most);
}

std::vector<uint32_t> Ids(int64_t count, uint32_t most) {
  std::vector<uint32_t> ids;
  for (int64_t n = 0; n < count; ++n) ids.push_back(Drawn(n, most));
  return ids;
}

// Every third block, some partial, some rows of blocks empty.
BlockList Blocks(const MaskCall& c, uint32_t bq, uint32_t bk, BitOrder order) {
  BlockList list{.bq = bq, .bk = bk, .indptr = {0}, .order = order};
  const int64_t rows = (c.rows + bq - 1) / bq, columns = (c.keys + bk - 1) / bk;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; ++n) {
      const uint32_t drawn = Drawn(r * columns + n, 6);
      if (r == 1 || drawn > 2) continue;
      list.indices.push_back(static_cast<uint32_t>(n));
      list.kind.push_back(drawn == 0);
      if (drawn != 0) continue;
      for (uint32_t byte = 0; byte < (bq * bk + 7) / 8; ++byte) {
        list.bitmaps.push_back(static_cast<uint8_t>(Drawn(r * 31 + n * 7 + byte, 256)));
      }
    }
    list.indptr.push_back(static_cast<uint32_t>(list.indices.size()));
  }
  return list;
}

ColRuns HiddenRuns(const MaskCall& c) {
  ColRuns runs{.m = 2};
  for (int64_t key = 0; key < c.keys; ++key) {
    const auto rows = static_cast<uint32_t>(c.rows);
    const uint32_t start = Drawn(key, rows), second = Drawn(key + 99, rows);
    runs.start.insert(runs.start.end(), {start, second});
    runs.end.insert(runs.end.end(), {std::min(rows, start + rows / 3), std::min(rows, second + 5)});
  }
  runs.base = CausalMask();
  return runs;
}

RowRuns Progressions(const MaskCall& c) {
  RowRuns runs{.r = 1};
  for (int64_t row = 0; row < c.rows; ++row) {
    const uint32_t stride = 1 + Drawn(row, 7), first = Drawn(row + 5, 11);
    const auto keys = static_cast<uint32_t>(c.keys);
    runs.first.push_back(std::min(first, keys - 1));
    runs.stride.push_back(stride);
    runs.count.push_back(first >= keys ? 0 : Drawn(row + 3, (keys - 1 - first) / stride + 2));
  }
  return runs;
}

RowIntervals Intervals(const MaskCall& c) {
  RowIntervals runs{.r = 2};
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto keys = static_cast<uint32_t>(c.keys);
    uint32_t begin = Drawn(row, keys / 2), end = begin + Drawn(row + 1, keys / 4);
    runs.begin.insert(runs.begin.end(), {begin, std::min(keys, end + 3)});
    runs.end.insert(runs.end.end(), {end, std::min(keys, end + 3 + Drawn(row + 2, keys / 3))});
  }
  return runs;
}

MaskBitmap Bits(const MaskCall& c) {
  MaskBitmap bits{.row_pitch_bits = static_cast<uint32_t>((c.keys + 7) / 8 * 8 + 8)};
  for (int64_t n = 0; n < c.rows * bits.row_pitch_bits / 8; ++n) {
    bits.data.push_back(static_cast<uint8_t>(Drawn(n, 256)));
  }
  return bits;
}

Rectangles Boxes(const MaskCall& c) {
  const auto rows = static_cast<uint32_t>(c.rows), keys = static_cast<uint32_t>(c.keys);
  return {{{0, rows / 2, 0, keys / 3, RectangleShape::kFull},
           {rows / 3, rows, 0, keys, RectangleShape::kCausal},
           {0, rows / 2, keys / 2, keys, RectangleShape::kInverseCausal},
           {rows / 2, rows, keys / 4, keys, RectangleShape::kBand}}};
}

struct Kind {
  const char* name;
  std::function<MaskSpec(const MaskCall&)> make;
};

MaskSpec One(MaskPattern pattern) {
  MaskSpec mask;
  mask.pattern.push_back(std::move(pattern));
  mask.pattern_of = {0};
  return mask;
}

MaskSpec PerHead(const MaskCall& c, bool per_batch) {
  MaskSpec mask;
  mask.pattern = {Band(), CausalMask(), Intervals(c), Leaf(StrideRel{5, 2})};
  for (int64_t n = 0; n < (per_batch ? c.batch : 1) * c.q_heads; ++n) {
    mask.pattern_of.push_back(static_cast<uint32_t>((n + n / c.q_heads) % 4));
  }
  return mask;
}

const std::vector<Kind>& Kinds() {
  static const auto* kinds = new std::vector<Kind>{
      {"all", [](const MaskCall&) { return One(Leaf(AllKeys())); }},
      {"nothing", [](const MaskCall&) { return One(Any({})); }},
      {"window", [](const MaskCall&) { return One(Window(20, 3)); }},
      {"dilated",
       [](const MaskCall&) {
         return One(Leaf(Dilated{4, 5, 6}));
       }},
      {"stride_rel",
       [](const MaskCall&) {
         return One(Leaf(StrideRel{7, 3}));
       }},
      {"stride_col",
       [](const MaskCall&) {
         return One(Leaf(StrideCol{16, 5, 9}));
       }},
      {"block_window",
       [](const MaskCall&) {
         return One(Leaf(BlockWindow{16, -1, 0, {0, 5}}));
       }},
      {"longformer",
       [](const MaskCall&) {
         return One(Any({Band(), Leaf(Global{{0, 40}, {4, 43}, GlobalDirection::kBoth})}));
       }},
      {"global_rows",
       [](const MaskCall&) {
         return One(Any({Band(), Leaf(Global{{2}, {9}, GlobalDirection::kRows})}));
       }},
      {"prefix",
       [](const MaskCall&) {
         return One(Any({CausalMask(), Leaf(Prefix{{50, 75}})}));
       }},
      {"segment",
       [](const MaskCall&) {
         return One(All({CausalMask(), Leaf(Segment{{0, 11, 11, 50, 90}})}));
       }},
      {"groups",
       [](const MaskCall& c) {
         return One(Leaf(Groups{Ids(c.rows, 4), Ids(c.keys, 4), false}));
       }},
      {"bigbird",
       [](const MaskCall&) {
         MaskExpr random{.op = RandomBlocks{16, 2, 7, true}, .of = {Band()}};
         return One(Any({Band(), std::move(random)}));
       }},
      {"not_band",
       [](const MaskCall&) {
         return One(All({CausalMask(), Not(Band())}));
       }},
      {"reference",
       [](const MaskCall&) {
         MaskSpec mask;
         mask.pattern = {Band(), Any({Leaf(PatternRef{0}), Leaf(StrideCol{32, 0, 2})})};
         mask.pattern_of = {1};
         return mask;
       }},
      {"blocks",
       [](const MaskCall& c) { return One(Blocks(c, 16, 16, BitOrder::kTile8ColumnMajor)); }},
      {"odd_blocks",
       [](const MaskCall& c) { return One(Blocks(c, 13, 29, BitOrder::kRowMajorLsb)); }},
      {"col_runs", [](const MaskCall& c) { return One(HiddenRuns(c)); }},
      {"row_runs", [](const MaskCall& c) { return One(Progressions(c)); }},
      {"row_intervals", [](const MaskCall& c) { return One(Intervals(c)); }},
      {"rectangles", [](const MaskCall& c) { return One(Boxes(c)); }},
      {"bits", [](const MaskCall& c) { return One(Bits(c)); }},
      {"per_head", [](const MaskCall& c) { return PerHead(c, false); }},
      {"per_entry", [](const MaskCall& c) { return PerHead(c, true); }},
  };
  return *kinds;
}

struct Option {
  const char* name;
  std::function<void(Problem&)> set;
};

const std::vector<Option>& Options() {
  static const auto* options = new std::vector<Option>{
      {"alone", [](Problem&) {}},
      {"causal", [](Problem& p) { p.causal = true; }},
      {"window", [](Problem& p) { p.window_left = p.window_right = 25; }},
      {"kv_lengths",
       [](Problem& p) {
         p.kv_lengths = {61, 100};
       }},
      {"bias",
       [](Problem& p) {
         p.bias = Bias{ElementType::kFloat32, {1, 4, 70, 100}, true};
       }},
      {"alibi_softcap",
       [](Problem& p) {
         p.alibi_slopes = {0.1f, 0.02f, 0.5f, 0};
         p.softcap = 5;
       }},
      {"dropout",
       [](Problem& p) {
         p.dropout = {60, 7, 1};
       }},
      {"zero_rest", [](Problem& p) { p.denominator = DenominatorKind::kZeroRest; }},
      {"zero_rest_kv_lengths_causal",
       [](Problem& p) {
         p.denominator = DenominatorKind::kZeroRest;
         p.kv_lengths = {80, 33};
         p.causal = true;
       }},
      {"sink",
       [](Problem& p) {
         p.denominator = DenominatorKind::kSink;
         p.sink_logits = {0.5f, -1, 2, 0};
       }},
      {"offsets",
       [](Problem& p) {
         p.alignment = Alignment::kOffsets;
         p.offsets = {-13, 60};
       }},
      {"packed",
       [](Problem& p) {
         p.layout = Layout::kPackedThd;
         p.cu_seqlens_q = {0, 66, 70};
         p.cu_seqlens_k = {0, 9, 100};
       }},
  };
  return *options;
}

Problem Sized(int64_t q_len, int64_t kv_len) {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = 16;
  p.alignment = Alignment::kBottomRight;
  return p;
}

// Elements take turns.
void Add(const Kind& kind, const std::string& name, Problem p,
         std::vector<ConformanceCase>& cases) {
  p.element = static_cast<ElementType>(1 + cases.size() % 3);
  MaskCall whole = MaskCallOf(p);
  whole.rows += p.mask_origin.row_begin;
  whole.keys += p.mask_origin.key_begin;
  auto mask = MaskDescription::Make(kind.make(whole), whole);
  CHECK(mask.ok()) << name << ": " << mask.status().ToString();
  p.mask = *std::move(mask);
  cases.push_back(
      {absl::StrCat("mask_", kind.name, "_", name, "_", absl::string_view(ElementName(p.element))),
       p, Values::kNormal});
}

}  // namespace

std::vector<ConformanceCase> MaskCases() {
  std::vector<ConformanceCase> cases;
  for (const Kind& kind : Kinds()) {
    for (const Option& option : Options()) {
      Problem p = Sized(70, 100);
      option.set(p);
      Add(kind, option.name, std::move(p), cases);
    }
    // A part of a larger mask.
    Problem part = Sized(40, 64);
    part.mask_origin = {.row_begin = 20, .key_begin = 33};
    Add(kind, "origin", part, cases);
    // Several of every engine's tiles.
    Problem large = Sized(150, 330);
    large.q_heads = large.kv_heads = 1;
    Add(kind, "large", large, cases);
  }
  return cases;
}

}  // namespace attnd
