#include "proto/attnd/v1/mask_codec.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

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

std::vector<uint8_t> Bytes(const std::string& bytes) { return {bytes.begin(), bytes.end()}; }

absl::StatusOr<std::vector<uint32_t>> DecodeArray(const v1::MaskArray& wire,
                                                  const std::string& field) {
  const size_t width = wire.entry_bytes();
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
  std::vector<uint32_t> numbers(wire.data().size() / width);
  const auto* at = reinterpret_cast<const uint8_t*>(wire.data().data());
  for (uint32_t& number : numbers) {
    number = 0;
    for (size_t n = 0; n < width; ++n) number |= uint32_t{*at++} << (8 * n);
  }
  return numbers;
}

absl::StatusOr<MaskExpr> DecodeExpr(const v1::Expr& wire, const std::string& field, int64_t depth);

absl::Status DecodeOperands(const v1::ExprList& wire, const std::string& field, int64_t depth,
                            std::vector<MaskExpr>& operands) {
  for (int n = 0; n < wire.e_size(); ++n) {
    ASSIGN_OR_RETURN(MaskExpr operand,
                     DecodeExpr(wire.e(n), absl::StrCat(field, ".e[", n, "]"), depth + 1));
    operands.push_back(std::move(operand));
  }
  return absl::OkStatus();
}

absl::StatusOr<Groups> DecodeGroups(const v1::Groups& wire, const std::string& field) {
  Groups groups;
  ASSIGN_OR_RETURN(groups.row, DecodeArray(wire.row(), absl::StrCat(field, ".row")));
  ASSIGN_OR_RETURN(groups.key, DecodeArray(wire.key(), absl::StrCat(field, ".key")));
  groups.per_batch = wire.per_batch();
  return groups;
}

// Those that hold other expressions or lists.
absl::Status DecodeCompound(const v1::Expr& wire, const std::string& field, int64_t depth,
                            MaskExpr& expr) {
  switch (wire.op_case()) {
    case v1::Expr::kAllOf:
      expr.op = AllOf();
      return DecodeOperands(wire.all_of(), absl::StrCat(field, ".all_of"), depth, expr.of);
    case v1::Expr::kAnyOf:
      expr.op = AnyOf();
      return DecodeOperands(wire.any_of(), absl::StrCat(field, ".any_of"), depth, expr.of);
    case v1::Expr::kNegate: {
      expr.op = Negate();
      ASSIGN_OR_RETURN(MaskExpr operand,
                       DecodeExpr(wire.negate(), absl::StrCat(field, ".negate"), depth + 1));
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
      ASSIGN_OR_RETURN(
          MaskExpr exclude,
          DecodeExpr(random.exclude(), absl::StrCat(field, ".random.exclude"), depth + 1));
      expr.of.push_back(std::move(exclude));
      return absl::OkStatus();
    }
    case v1::Expr::kGroups: {
      ASSIGN_OR_RETURN(expr.op, DecodeGroups(wire.groups(), absl::StrCat(field, ".groups")));
      return absl::OkStatus();
    }
    default:
      return BadField(field, "an expression", "none");
  }
}

absl::StatusOr<MaskExpr> DecodeExpr(const v1::Expr& wire, const std::string& field, int64_t depth) {
  if (depth > kMaxMaskDepth) {
    return BadField(field, absl::StrCat("depth ", kMaxMaskDepth, " at most"), "more");
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
      RETURN_IF_ERROR(DecodeCompound(wire, field, depth, expr));
  }
  return expr;
}

absl::StatusOr<BlockList> DecodeBlocks(const v1::BlockList& wire, const std::string& field) {
  BlockList blocks{.bq = wire.bq(), .bk = wire.bk()};
  ASSIGN_OR_RETURN(blocks.indptr, DecodeArray(wire.indptr(), absl::StrCat(field, ".indptr")));
  ASSIGN_OR_RETURN(blocks.indices, DecodeArray(wire.indices(), absl::StrCat(field, ".indices")));
  ASSIGN_OR_RETURN(blocks.bitmap_of,
                   DecodeArray(wire.bitmap_of(), absl::StrCat(field, ".bitmap_of")));
  blocks.kind = Bytes(wire.kind());
  blocks.bitmaps = Bytes(wire.bitmaps());
  blocks.order = static_cast<BitOrder>(wire.order());
  if (wire.has_partial_expr()) {
    ASSIGN_OR_RETURN(blocks.partial_expr,
                     DecodeExpr(wire.partial_expr(), absl::StrCat(field, ".partial_expr"), 2));
  }
  return blocks;
}

absl::StatusOr<ColRuns> DecodeColRuns(const v1::ColRuns& wire, const std::string& field) {
  ColRuns runs{.m = wire.m()};
  ASSIGN_OR_RETURN(runs.start, DecodeArray(wire.start(), absl::StrCat(field, ".start")));
  ASSIGN_OR_RETURN(runs.end, DecodeArray(wire.end(), absl::StrCat(field, ".end")));
  if (wire.has_base()) {
    ASSIGN_OR_RETURN(runs.base, DecodeExpr(wire.base(), absl::StrCat(field, ".base"), 2));
  }
  return runs;
}

absl::StatusOr<RowRuns> DecodeRowRuns(const v1::RowRuns& wire, const std::string& field) {
  RowRuns runs{.r = wire.r()};
  ASSIGN_OR_RETURN(runs.first, DecodeArray(wire.first(), absl::StrCat(field, ".first")));
  ASSIGN_OR_RETURN(runs.stride, DecodeArray(wire.stride(), absl::StrCat(field, ".stride")));
  ASSIGN_OR_RETURN(runs.count, DecodeArray(wire.count(), absl::StrCat(field, ".count")));
  return runs;
}

absl::StatusOr<RowIntervals> DecodeIntervals(const v1::RowIntervals& wire,
                                             const std::string& field) {
  RowIntervals intervals{.r = wire.r()};
  ASSIGN_OR_RETURN(intervals.begin, DecodeArray(wire.begin(), absl::StrCat(field, ".begin")));
  ASSIGN_OR_RETURN(intervals.end, DecodeArray(wire.end(), absl::StrCat(field, ".end")));
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

absl::StatusOr<MaskPattern> DecodePattern(const v1::Pattern& wire, const std::string& field) {
  switch (wire.kind_case()) {
    case v1::Pattern::kExpr:
      return DecodeExpr(wire.expr(), absl::StrCat(field, ".expr"), 1);
    case v1::Pattern::kBlocks:
      return DecodeBlocks(wire.blocks(), absl::StrCat(field, ".blocks"));
    case v1::Pattern::kColRuns:
      return DecodeColRuns(wire.col_runs(), absl::StrCat(field, ".col_runs"));
    case v1::Pattern::kRowRuns:
      return DecodeRowRuns(wire.row_runs(), absl::StrCat(field, ".row_runs"));
    case v1::Pattern::kRowIntervals:
      return DecodeIntervals(wire.row_intervals(), absl::StrCat(field, ".row_intervals"));
    case v1::Pattern::kRectangles:
      return DecodeRectangles(wire.rectangles());
    case v1::Pattern::kBits:
      return MaskBitmap{wire.bits().row_pitch_bits(), Bytes(wire.bits().data())};
    case v1::Pattern::KIND_NOT_SET:
      break;
  }
  return BadField(field, "a pattern", "none");
}

}  // namespace

absl::StatusOr<MaskSpec> DecodeMask(const v1::MaskSpec& wire) {
  if (wire.version() != 1) {
    return BadField(absl::StrCat(kMask, ".version"), "1", absl::StrCat(wire.version()));
  }
  if (wire.pattern_size() > kMaxMaskPatterns) {
    return BadField(absl::StrCat(kMask, ".pattern"),
                    absl::StrCat("at most ", kMaxMaskPatterns, " patterns"),
                    absl::StrCat(wire.pattern_size()));
  }
  MaskSpec mask{.pattern_of = Numbers(wire.pattern_of()),
                .empty_row = static_cast<EmptyRow>(wire.empty_row()),
                .origin = DecodeMaskOrigin(wire),
                .extents = {.batch = wire.extents().batch(),
                            .q_heads = wire.extents().q_heads(),
                            .rows = wire.extents().rows(),
                            .keys = wire.extents().keys()}};
  for (int n = 0; n < wire.pattern_size(); ++n) {
    ASSIGN_OR_RETURN(MaskPattern pattern,
                     DecodePattern(wire.pattern(n), absl::StrCat(kMask, ".pattern[", n, "]")));
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

// In the narrowest entries that hold all of them; short lists as numbers.
void EncodeArray(const std::vector<uint32_t>& numbers, v1::MaskArray& wire) {
  constexpr size_t kFew = 64;
  if (numbers.size() <= kFew) {
    wire.mutable_value()->Assign(numbers.begin(), numbers.end());
    return;
  }
  const uint32_t most = *std::max_element(numbers.begin(), numbers.end());
  const size_t width = most < 256 ? 1 : most < 65536 ? 2 : 4;
  std::string& data = *wire.mutable_data();
  data.reserve(numbers.size() * width);
  for (uint32_t number : numbers) {
    for (size_t n = 0; n < width; ++n) data.push_back(static_cast<char>(number >> (8 * n)));
  }
  wire.set_entry_bytes(static_cast<uint32_t>(width));
}

std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

template <typename List, typename Numbers>
void Assign(const Numbers& numbers, List* list) {
  list->Assign(numbers.begin(), numbers.end());
}

void EncodeExpr(const MaskExpr& expr, v1::Expr& wire);

void EncodeOperands(const MaskExpr& expr, v1::ExprList& wire) {
  for (const MaskExpr& operand : expr.of) EncodeExpr(operand, *wire.add_e());
}

// One function for each kind of expression.
struct ExprEncoder {
  const MaskExpr& expr;
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
    EncodeArray(op.row, *out.mutable_row());
    EncodeArray(op.key, *out.mutable_key());
    out.set_per_batch(op.per_batch);
  }
  void operator()(const RandomBlocks& op) const {
    v1::RandomBlocks& out = *wire.mutable_random();
    out.set_block(op.block);
    out.set_per_row(op.per_row);
    out.set_seed(op.seed);
    out.set_per_head(op.per_head);
    if (!expr.of.empty()) EncodeExpr(expr.of[0], *out.mutable_exclude());
  }
  void operator()(const AllOf&) const { EncodeOperands(expr, *wire.mutable_all_of()); }
  void operator()(const AnyOf&) const { EncodeOperands(expr, *wire.mutable_any_of()); }
  void operator()(const Negate&) const { EncodeExpr(expr.of[0], *wire.mutable_negate()); }
  void operator()(const PatternRef& op) const { wire.set_pattern_ref(op.pattern); }
};

void EncodeExpr(const MaskExpr& expr, v1::Expr& wire) {
  std::visit(ExprEncoder{expr, wire}, expr.op);
}

// One function for each kind of pattern.
struct PatternEncoder {
  v1::Pattern& wire;

  void operator()(std::monostate) const {}
  void operator()(const MaskExpr& expr) const { EncodeExpr(expr, *wire.mutable_expr()); }
  void operator()(const BlockList& blocks) const {
    v1::BlockList& out = *wire.mutable_blocks();
    out.set_bq(blocks.bq);
    out.set_bk(blocks.bk);
    EncodeArray(blocks.indptr, *out.mutable_indptr());
    EncodeArray(blocks.indices, *out.mutable_indices());
    out.set_kind(Text(blocks.kind));
    out.set_bitmaps(Text(blocks.bitmaps));
    out.set_order(static_cast<v1::BitOrder>(blocks.order));
    if (blocks.partial_expr) EncodeExpr(*blocks.partial_expr, *out.mutable_partial_expr());
    EncodeArray(blocks.bitmap_of, *out.mutable_bitmap_of());
  }
  void operator()(const ColRuns& runs) const {
    v1::ColRuns& out = *wire.mutable_col_runs();
    out.set_m(runs.m);
    EncodeArray(runs.start, *out.mutable_start());
    EncodeArray(runs.end, *out.mutable_end());
    if (runs.base) EncodeExpr(*runs.base, *out.mutable_base());
  }
  void operator()(const RowRuns& runs) const {
    v1::RowRuns& out = *wire.mutable_row_runs();
    out.set_r(runs.r);
    EncodeArray(runs.first, *out.mutable_first());
    EncodeArray(runs.stride, *out.mutable_stride());
    EncodeArray(runs.count, *out.mutable_count());
  }
  void operator()(const RowIntervals& intervals) const {
    v1::RowIntervals& out = *wire.mutable_row_intervals();
    out.set_r(intervals.r);
    EncodeArray(intervals.begin, *out.mutable_begin());
    EncodeArray(intervals.end, *out.mutable_end());
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
    wire.mutable_bits()->set_row_pitch_bits(bits.row_pitch_bits);
    wire.mutable_bits()->set_data(Text(bits.data));
  }
};

}  // namespace

v1::MaskSpec EncodeMaskSpec(const MaskSpec& mask) {
  v1::MaskSpec wire;
  wire.set_version(1);
  for (const MaskPattern& pattern : mask.pattern) {
    std::visit(PatternEncoder{*wire.add_pattern()}, pattern);
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

void EncodeMaskOrigin(const MaskOrigin& origin, v1::MaskSpec& wire) {
  if (origin == MaskOrigin()) return;
  v1::MaskOrigin& out = *wire.mutable_origin();
  out.set_row_begin(static_cast<uint32_t>(origin.row_begin));
  out.set_key_begin(static_cast<uint32_t>(origin.key_begin));
  out.set_batch_begin(static_cast<uint32_t>(origin.batch_begin));
  out.set_head_begin(static_cast<uint32_t>(origin.head_begin));
}

}  // namespace attnd
