#include "server/wire/decode_mask.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr absl::string_view kMask = "problem.mask";

absl::Status BadField(absl::string_view field, absl::string_view expected, absl::string_view got) {
  return FieldError(reason::kBadField, field, expected, got);
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
      expr.op = BlockWindow{window.p(), window.lo(), window.hi(),
                            {window.shift().begin(), window.shift().end()}};
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

}  // namespace attnd
