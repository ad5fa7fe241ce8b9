#include "proto/attnd/v1/mask_codec.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/mask_data.h"

namespace attnd {
namespace {

constexpr absl::string_view kMask = "problem.mask";

absl::Status BadField(absl::string_view field, absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", got));
}

template <typename List>
std::vector<uint32_t> Numbers(const List& list) {
  return {list.begin(), list.end()};
}

absl::StatusOr<std::vector<uint32_t>> DecodeArray(const v1::MaskArray& wire, MaskDataReader& data,
                                                  const std::string& field) {
  const size_t width = wire.entry_bytes();
  if (wire.count() > 0) return NumbersOf(data.Next(wire.count() * width), width);
  if (wire.data().empty()) {
    if (width == 0) return Numbers(wire.value());
    return BadField(absl::StrCat(field, ".entry_bytes"), "none without data", absl::StrCat(width));
  }
  if (wire.value_size() > 0) return BadField(field, "either value or data", "both");
  if (width != 1 && width != 2 && width != 4) {
    return BadField(absl::StrCat(field, ".entry_bytes"), "1, 2 or 4", absl::StrCat(width));
  }
  if (wire.data().size() % width != 0) {
    return BadField(absl::StrCat(field, ".data"), absl::StrCat("a multiple of ", width, " bytes"),
                    absl::StrCat(wire.data().size()));
  }
  return NumbersOf(wire.data(), width);
}

// Reads a list of bytes, which lies in the message or in `data`.
std::vector<uint8_t> DecodeBytes(const std::string& wire, uint64_t bytes, MaskDataReader& data) {
  const absl::string_view list = bytes > 0 ? data.Next(bytes) : absl::string_view(wire);
  return {list.begin(), list.end()};
}

// Where a node stands: its field's name, how deep, and the lists that follow.
struct Place {
  std::string field;
  int64_t depth;
  MaskDataReader& data;

  Place Inner(absl::string_view name) const {
    return {absl::StrCat(field, ".", name), depth + 1, data};
  }
};

absl::StatusOr<MaskExpr> DecodeExpr(const v1::Expr& wire, const Place& place);

absl::Status DecodeOperands(const v1::ExprList& wire, const Place& place,
                            std::vector<MaskExpr>& operands) {
  for (int n = 0; n < wire.e_size(); ++n) {
    const Place at = {absl::StrCat(place.field, ".e[", n, "]"), place.depth, place.data};
    ASSIGN_OR_RETURN(MaskExpr operand, DecodeExpr(wire.e(n), at));
    operands.push_back(std::move(operand));
  }
  return absl::OkStatus();
}

absl::StatusOr<Groups> DecodeGroups(const v1::Groups& wire, const Place& place) {
  Groups groups;
  ASSIGN_OR_RETURN(groups.row,
                   DecodeArray(wire.row(), place.data, absl::StrCat(place.field, ".row")));
  ASSIGN_OR_RETURN(groups.key,
                   DecodeArray(wire.key(), place.data, absl::StrCat(place.field, ".key")));
  groups.per_batch = wire.per_batch();
  return groups;
}

// Those that hold other expressions or lists.
absl::Status DecodeCompound(const v1::Expr& wire, const Place& place, MaskExpr& expr) {
  switch (wire.op_case()) {
    case v1::Expr::kAllOf:
      expr.op = AllOf();
      return DecodeOperands(wire.all_of(), place.Inner("all_of"), expr.of);
    case v1::Expr::kAnyOf:
      expr.op = AnyOf();
      return DecodeOperands(wire.any_of(), place.Inner("any_of"), expr.of);
    case v1::Expr::kNegate: {
      expr.op = Negate();
      ASSIGN_OR_RETURN(MaskExpr operand, DecodeExpr(wire.negate(), place.Inner("negate")));
      expr.of.push_back(std::move(operand));
      return absl::OkStatus();
    }
    case v1::Expr::kRandom: {
      const v1::RandomBlocks& random = wire.random();
      expr.op = RandomBlocks{.block = random.block(),
                             .per_row = random.per_row(),
                             .seed = random.seed(),
                             .per_head = random.per_head()};
      if (!random.has_exclude()) return absl::OkStatus();
      ASSIGN_OR_RETURN(MaskExpr exclude,
                       DecodeExpr(random.exclude(), place.Inner("random.exclude")));
      expr.of.push_back(std::move(exclude));
      return absl::OkStatus();
    }
    case v1::Expr::kGroups: {
      ASSIGN_OR_RETURN(expr.op, DecodeGroups(wire.groups(), place.Inner("groups")));
      return absl::OkStatus();
    }
    default:
      return BadField(place.field, "an expression", "none");
  }
}

absl::StatusOr<MaskExpr> DecodeExpr(const v1::Expr& wire, const Place& place) {
  if (place.depth > kMaxMaskDepth) {
    return BadField(place.field, absl::StrCat("depth ", kMaxMaskDepth, " at most"), "more");
  }
  MaskExpr expr;
  switch (wire.op_case()) {
    case v1::Expr::kAll:
      expr.op = AllKeys();
      break;
    case v1::Expr::kWindow:
      expr.op = RelativeWindow{wire.window().left(), wire.window().right()};
      break;
    case v1::Expr::kDilated:
      expr.op = Dilated{wire.dilated().step(), wire.dilated().left(), wire.dilated().right()};
      break;
    case v1::Expr::kStrideRel:
      expr.op = StrideRel{wire.stride_rel().p(), wire.stride_rel().phase()};
      break;
    case v1::Expr::kStrideCol:
      expr.op = StrideCol{wire.stride_col().p(), wire.stride_col().lo(), wire.stride_col().hi()};
      break;
    case v1::Expr::kBlockWindow: {
      const v1::BlockWindow& window = wire.block_window();
      expr.op = BlockWindow{
          window.p(), window.lo(), window.hi(), {window.shift().begin(), window.shift().end()}};
      break;
    }
    case v1::Expr::kGlobal:
      expr.op = Global{Numbers(wire.global().start()), Numbers(wire.global().end()),
                       static_cast<GlobalDirection>(wire.global().direction())};
      break;
    case v1::Expr::kPrefix:
      expr.op = Prefix{Numbers(wire.prefix().len())};
      break;
    case v1::Expr::kSegment:
      expr.op = Segment{Numbers(wire.segment().cu())};
      break;
    case v1::Expr::kPatternRef:
      expr.op = PatternRef{wire.pattern_ref()};
      break;
    default:
      RETURN_IF_ERROR(DecodeCompound(wire, place, expr));
  }
  return expr;
}

absl::StatusOr<BlockList> DecodeBlocks(const v1::BlockList& wire, const Place& place) {
  const auto array = [&place](const v1::MaskArray& from, absl::string_view name) {
    return DecodeArray(from, place.data, absl::StrCat(place.field, ".", name));
  };
  BlockList blocks{.bq = wire.bq(), .bk = wire.bk()};
  ASSIGN_OR_RETURN(blocks.indptr, array(wire.indptr(), "indptr"));
  ASSIGN_OR_RETURN(blocks.indices, array(wire.indices(), "indices"));
  if (wire.has_partial_expr()) {
    ASSIGN_OR_RETURN(blocks.partial_expr,
                     DecodeExpr(wire.partial_expr(), place.Inner("partial_expr")));
  }
  ASSIGN_OR_RETURN(blocks.bitmap_of, array(wire.bitmap_of(), "bitmap_of"));
  blocks.kind = DecodeBytes(wire.kind(), wire.kind_bytes(), place.data);
  blocks.bitmaps = DecodeBytes(wire.bitmaps(), wire.bitmaps_bytes(), place.data);
  blocks.order = static_cast<BitOrder>(wire.order());
  return blocks;
}

absl::StatusOr<ColRuns> DecodeColRuns(const v1::ColRuns& wire, const Place& place) {
  const std::string& field = place.field;
  ColRuns runs{.m = wire.m()};
  ASSIGN_OR_RETURN(runs.start,
                   DecodeArray(wire.start(), place.data, absl::StrCat(field, ".start")));
  ASSIGN_OR_RETURN(runs.end, DecodeArray(wire.end(), place.data, absl::StrCat(field, ".end")));
  if (wire.has_base()) {
    ASSIGN_OR_RETURN(runs.base, DecodeExpr(wire.base(), place.Inner("base")));
  }
  return runs;
}

absl::StatusOr<RowRuns> DecodeRowRuns(const v1::RowRuns& wire, const Place& place) {
  const auto array = [&place](const v1::MaskArray& from, absl::string_view name) {
    return DecodeArray(from, place.data, absl::StrCat(place.field, ".", name));
  };
  RowRuns runs{.r = wire.r()};
  ASSIGN_OR_RETURN(runs.first, array(wire.first(), "first"));
  ASSIGN_OR_RETURN(runs.stride, array(wire.stride(), "stride"));
  ASSIGN_OR_RETURN(runs.count, array(wire.count(), "count"));
  return runs;
}

absl::StatusOr<RowIntervals> DecodeIntervals(const v1::RowIntervals& wire, const Place& place) {
  const std::string& field = place.field;
  RowIntervals intervals{.r = wire.r()};
  ASSIGN_OR_RETURN(intervals.begin,
                   DecodeArray(wire.begin(), place.data, absl::StrCat(field, ".begin")));
  ASSIGN_OR_RETURN(intervals.end, DecodeArray(wire.end(), place.data, absl::StrCat(field, ".end")));
  return intervals;
}

Rectangles DecodeRectangles(const v1::Rectangles& wire) {
  Rectangles rectangles;
  rectangles.of.reserve(wire.of_size());
  for (const v1::Rectangle& from : wire.of()) {
    rectangles.of.push_back({.row_begin = from.row_begin(),
                             .row_end = from.row_end(),
                             .key_begin = from.key_begin(),
                             .key_end = from.key_end(),
                             .shape = static_cast<RectangleShape>(from.shape())});
  }
  return rectangles;
}

absl::StatusOr<MaskPattern> DecodePattern(const v1::Pattern& wire, const Place& place) {
  switch (wire.kind_case()) {
    case v1::Pattern::kExpr:
      return DecodeExpr(wire.expr(), place.Inner("expr"));
    case v1::Pattern::kBlocks:
      return DecodeBlocks(wire.blocks(), place.Inner("blocks"));
    case v1::Pattern::kColRuns:
      return DecodeColRuns(wire.col_runs(), place.Inner("col_runs"));
    case v1::Pattern::kRowRuns:
      return DecodeRowRuns(wire.row_runs(), place.Inner("row_runs"));
    case v1::Pattern::kRowIntervals:
      return DecodeIntervals(wire.row_intervals(), place.Inner("row_intervals"));
    case v1::Pattern::kRectangles:
      return DecodeRectangles(wire.rectangles());
    case v1::Pattern::kBits:
      return MaskBitmap{wire.bits().row_pitch_bits(),
                        DecodeBytes(wire.bits().data(), wire.bits().data_bytes(), place.data)};
    case v1::Pattern::KIND_NOT_SET:
      break;
  }
  return BadField(place.field, "a pattern", "none");
}

}  // namespace

absl::StatusOr<MaskSpec> DecodeMask(const v1::MaskSpec& wire, absl::string_view data) {
  if (wire.version() != 1) {
    return BadField(absl::StrCat(kMask, ".version"), "1", absl::StrCat(wire.version()));
  }
  if (wire.pattern_size() > kMaxMaskPatterns) {
    return BadField(absl::StrCat(kMask, ".pattern"),
                    absl::StrCat("at most ", kMaxMaskPatterns, " patterns"),
                    absl::StrCat(wire.pattern_size()));
  }
  ASSIGN_OR_RETURN(const int64_t data_bytes, MaskDataBytes(wire));
  if (data_bytes != static_cast<int64_t>(data.size())) {
    return BadField("mask_data", absl::StrCat(data_bytes, " bytes"),
                    absl::StrCat(data.size(), " bytes"));
  }
  MaskDataReader reader(data);
  MaskSpec mask{.pattern_of = Numbers(wire.pattern_of()),
                .empty_row = static_cast<EmptyRow>(wire.empty_row()),
                .origin = DecodeMaskOrigin(wire),
                .extents = {.batch = wire.extents().batch(),
                            .q_heads = wire.extents().q_heads(),
                            .rows = wire.extents().rows(),
                            .keys = wire.extents().keys()}};
  for (int n = 0; n < wire.pattern_size(); ++n) {
    const Place place = {absl::StrCat(kMask, ".pattern[", n, "]"), 0, reader};
    ASSIGN_OR_RETURN(MaskPattern pattern, DecodePattern(wire.pattern(n), place));
    mask.pattern.push_back(std::move(pattern));
  }
  return mask;
}

MaskOrigin DecodeMaskOrigin(const v1::MaskSpec& wire) {
  const v1::MaskOrigin& origin = wire.origin();
  return {.row_begin = origin.row_begin(),
          .key_begin = origin.key_begin(),
          .batch_begin = origin.batch_begin(),
          .head_begin = origin.head_begin()};
}

// ---- MaskSpec → attnd.v1.MaskSpec.

namespace {

// Where lists go: into the message, or behind it.
struct Lists {
  MaskDataWriter* outside = nullptr;

  // In the narrowest entries that hold all of them; short lists as numbers.
  void Add(const std::vector<uint32_t>& numbers, v1::MaskArray& wire) const {
    constexpr size_t kFew = 64;
    if (numbers.size() <= kFew) {
      wire.mutable_value()->Assign(numbers.begin(), numbers.end());
      return;
    }
    const uint32_t most = *std::max_element(numbers.begin(), numbers.end());
    const size_t width = most < 256 ? 1 : most < 65536 ? 2 : 4;
    std::string data;
    data.reserve(numbers.size() * width);
    for (uint32_t number : numbers) {
      for (size_t n = 0; n < width; ++n) data.push_back(static_cast<char>(number >> (8 * n)));
    }
    wire.set_entry_bytes(static_cast<uint32_t>(width));
    if (outside == nullptr) {
      *wire.mutable_data() = std::move(data);
      return;
    }
    wire.set_count(numbers.size());
    outside->Add(data);
  }
  // A list of bytes: what stands in the message, and how many behind it.
  std::pair<std::string, uint64_t> Add(const std::vector<uint8_t>& bytes) const {
    std::string text(bytes.begin(), bytes.end());
    if (outside == nullptr || text.empty()) return {std::move(text), 0};
    outside->Add(text);
    return {"", text.size()};
  }
};

template <typename List, typename Numbers>
void Assign(const Numbers& numbers, List* list) {
  list->Assign(numbers.begin(), numbers.end());
}

void EncodeExpr(const MaskExpr& expr, const Lists& lists, v1::Expr& wire);

void EncodeOperands(const MaskExpr& expr, const Lists& lists, v1::ExprList& wire) {
  for (const MaskExpr& operand : expr.of) EncodeExpr(operand, lists, *wire.add_e());
}

// One function for each kind of expression.
struct ExprEncoder {
  const MaskExpr& expr;
  const Lists& lists;
  v1::Expr& wire;

  void operator()(std::monostate) const {}
  void operator()(const AllKeys&) const { wire.mutable_all(); }
  void operator()(const RelativeWindow& op) const {
    wire.mutable_window()->set_left(op.left);
    wire.mutable_window()->set_right(op.right);
  }
  void operator()(const Dilated& op) const {
    v1::Dilated& out = *wire.mutable_dilated();
    out.set_step(op.step);
    out.set_left(op.left);
    out.set_right(op.right);
  }
  void operator()(const StrideRel& op) const {
    wire.mutable_stride_rel()->set_p(op.p);
    wire.mutable_stride_rel()->set_phase(op.phase);
  }
  void operator()(const StrideCol& op) const {
    v1::StrideCol& out = *wire.mutable_stride_col();
    out.set_p(op.p);
    out.set_lo(op.lo);
    out.set_hi(op.hi);
  }
  void operator()(const BlockWindow& op) const {
    v1::BlockWindow& out = *wire.mutable_block_window();
    out.set_p(op.p);
    out.set_lo(op.lo);
    out.set_hi(op.hi);
    Assign(op.shift, out.mutable_shift());
  }
  void operator()(const Global& op) const {
    v1::Global& out = *wire.mutable_global();
    Assign(op.start, out.mutable_start());
    Assign(op.end, out.mutable_end());
    out.set_direction(static_cast<v1::GlobalDirection>(op.direction));
  }
  void operator()(const Prefix& op) const { Assign(op.len, wire.mutable_prefix()->mutable_len()); }
  void operator()(const Segment& op) const { Assign(op.cu, wire.mutable_segment()->mutable_cu()); }
  void operator()(const Groups& op) const {
    v1::Groups& out = *wire.mutable_groups();
    lists.Add(op.row, *out.mutable_row());
    lists.Add(op.key, *out.mutable_key());
    out.set_per_batch(op.per_batch);
  }
  void operator()(const RandomBlocks& op) const {
    v1::RandomBlocks& out = *wire.mutable_random();
    out.set_block(op.block);
    out.set_per_row(op.per_row);
    out.set_seed(op.seed);
    out.set_per_head(op.per_head);
    if (!expr.of.empty()) EncodeExpr(expr.of[0], lists, *out.mutable_exclude());
  }
  void operator()(const AllOf&) const { EncodeOperands(expr, lists, *wire.mutable_all_of()); }
  void operator()(const AnyOf&) const { EncodeOperands(expr, lists, *wire.mutable_any_of()); }
  void operator()(const Negate&) const { EncodeExpr(expr.of[0], lists, *wire.mutable_negate()); }
  void operator()(const PatternRef& op) const { wire.set_pattern_ref(op.pattern); }
};

void EncodeExpr(const MaskExpr& expr, const Lists& lists, v1::Expr& wire) {
  std::visit(ExprEncoder{expr, lists, wire}, expr.op);
}

// One function for each kind of pattern.
struct PatternEncoder {
  const Lists& lists;
  v1::Pattern& wire;

  void operator()(std::monostate) const {}
  void operator()(const MaskExpr& expr) const { EncodeExpr(expr, lists, *wire.mutable_expr()); }
  void operator()(const BlockList& blocks) const {
    v1::BlockList& out = *wire.mutable_blocks();
    out.set_bq(blocks.bq);
    out.set_bk(blocks.bk);
    lists.Add(blocks.indptr, *out.mutable_indptr());
    lists.Add(blocks.indices, *out.mutable_indices());
    out.set_order(static_cast<v1::BitOrder>(blocks.order));
    if (blocks.partial_expr) EncodeExpr(*blocks.partial_expr, lists, *out.mutable_partial_expr());
    lists.Add(blocks.bitmap_of, *out.mutable_bitmap_of());
    auto [kind, kind_bytes] = lists.Add(blocks.kind);
    out.set_kind(std::move(kind));
    out.set_kind_bytes(kind_bytes);
    auto [bitmaps, bitmaps_bytes] = lists.Add(blocks.bitmaps);
    out.set_bitmaps(std::move(bitmaps));
    out.set_bitmaps_bytes(bitmaps_bytes);
  }
  void operator()(const ColRuns& runs) const {
    v1::ColRuns& out = *wire.mutable_col_runs();
    out.set_m(runs.m);
    lists.Add(runs.start, *out.mutable_start());
    lists.Add(runs.end, *out.mutable_end());
    if (runs.base) EncodeExpr(*runs.base, lists, *out.mutable_base());
  }
  void operator()(const RowRuns& runs) const {
    v1::RowRuns& out = *wire.mutable_row_runs();
    out.set_r(runs.r);
    lists.Add(runs.first, *out.mutable_first());
    lists.Add(runs.stride, *out.mutable_stride());
    lists.Add(runs.count, *out.mutable_count());
  }
  void operator()(const RowIntervals& intervals) const {
    v1::RowIntervals& out = *wire.mutable_row_intervals();
    out.set_r(intervals.r);
    lists.Add(intervals.begin, *out.mutable_begin());
    lists.Add(intervals.end, *out.mutable_end());
  }
  void operator()(const Rectangles& rectangles) const {
    v1::Rectangles& out = *wire.mutable_rectangles();
    for (const MaskRectangle& from : rectangles.of) {
      v1::Rectangle& to = *out.add_of();
      to.set_row_begin(from.row_begin);
      to.set_row_end(from.row_end);
      to.set_key_begin(from.key_begin);
      to.set_key_end(from.key_end);
      to.set_shape(static_cast<v1::Rectangle::Shape>(from.shape));
    }
  }
  void operator()(const MaskBitmap& bits) const {
    v1::Bitmap& out = *wire.mutable_bits();
    out.set_row_pitch_bits(bits.row_pitch_bits);
    auto [data, data_bytes] = lists.Add(bits.data);
    out.set_data(std::move(data));
    out.set_data_bytes(data_bytes);
  }
};

v1::MaskSpec Encode(const MaskSpec& mask, const Lists& lists) {
  v1::MaskSpec wire;
  wire.set_version(1);
  for (const MaskPattern& pattern : mask.pattern) {
    std::visit(PatternEncoder{lists, *wire.add_pattern()}, pattern);
  }
  Assign(mask.pattern_of, wire.mutable_pattern_of());
  wire.set_empty_row(static_cast<v1::EmptyRow>(mask.empty_row));
  EncodeMaskOrigin(mask.origin, wire);
  v1::MaskExtents& extents = *wire.mutable_extents();
  extents.set_batch(static_cast<uint32_t>(mask.extents.batch));
  extents.set_q_heads(static_cast<uint32_t>(mask.extents.q_heads));
  extents.set_rows(static_cast<uint32_t>(mask.extents.rows));
  extents.set_keys(static_cast<uint32_t>(mask.extents.keys));
  return wire;
}

}  // namespace

v1::MaskSpec EncodeMaskSpec(const MaskSpec& mask) { return Encode(mask, {}); }

SplitMask EncodeSplitMask(const MaskSpec& mask) {
  MaskDataWriter lists;
  v1::MaskSpec spec = Encode(mask, {.outside = &lists});
  return {.spec = std::move(spec), .data = lists.Take()};
}

void EncodeMaskOrigin(const MaskOrigin& origin, v1::MaskSpec& wire) {
  if (origin == MaskOrigin()) return;
  v1::MaskOrigin& out = *wire.mutable_origin();
  out.set_row_begin(static_cast<uint32_t>(origin.row_begin));
  out.set_key_begin(static_cast<uint32_t>(origin.key_begin));
  out.set_batch_begin(static_cast<uint32_t>(origin.batch_begin));
  out.set_head_begin(static_cast<uint32_t>(origin.head_begin));
}

}  // namespace attnd
