#include "proto/attnd/v1/mask_data.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr int64_t kBeyondAllLimits = int64_t{1} << 60;
constexpr uint64_t kMaxCount = uint64_t{1} << 40;

absl::Status BadDataField(absl::string_view field, absl::string_view expected,
                          absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", got));
}

// Where a list stands; text only where something is wrong with it.
struct At {
  const At* parent;
  absl::string_view name;
  int index = -1;

  std::string Text() const {
    const std::string outer = parent == nullptr ? "" : absl::StrCat(parent->Text(), ".");
    return index < 0 ? absl::StrCat(outer, name) : absl::StrCat(outer, name, "[", index, "]");
  }
};

// Walks through a mask in the order of its fields and adds up its lists.
class Sizes {
 public:
  absl::Status Walk(const v1::MaskSpec& mask) {
    for (int n = 0; n < mask.pattern_size(); ++n) {
      RETURN_IF_ERROR(Pattern(mask.pattern(n), {&mask_, "pattern", n}));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Total() const {
    if (inline_numbers_ <= kMaxInlineMaskNumbers) return total_;
    return BadDataField(mask_.Text(),
                        absl::StrCat("at most ", kMaxInlineMaskNumbers,
                                     " numbers as `value` of its lists, more in mask_data"),
                        absl::StrCat(inline_numbers_));
  }

 private:
  absl::Status Pattern(const v1::Pattern& pattern, const At& at) {
    switch (pattern.kind_case()) {
      case v1::Pattern::kExpr:
        return Expr(pattern.expr(), {&at, "expr"});
      case v1::Pattern::kBlocks:
        return Blocks(pattern.blocks(), {&at, "blocks"});
      case v1::Pattern::kColRuns: {
        const At runs = {&at, "col_runs"};
        RETURN_IF_ERROR(Array(pattern.col_runs().start(), {&runs, "start"}));
        RETURN_IF_ERROR(Array(pattern.col_runs().end(), {&runs, "end"}));
        return Expr(pattern.col_runs().base(), {&runs, "base"});
      }
      case v1::Pattern::kRowRuns: {
        const At runs = {&at, "row_runs"};
        RETURN_IF_ERROR(Array(pattern.row_runs().first(), {&runs, "first"}));
        RETURN_IF_ERROR(Array(pattern.row_runs().stride(), {&runs, "stride"}));
        return Array(pattern.row_runs().count(), {&runs, "count"});
      }
      case v1::Pattern::kRowIntervals: {
        const At runs = {&at, "row_intervals"};
        RETURN_IF_ERROR(Array(pattern.row_intervals().begin(), {&runs, "begin"}));
        return Array(pattern.row_intervals().end(), {&runs, "end"});
      }
      case v1::Pattern::kBits: {
        const At bits = {&at, "bits"};
        return Bytes(pattern.bits().data_bytes(), pattern.bits().data(), {&bits, "data_bytes"});
      }
      default:
        return absl::OkStatus();
    }
  }

  absl::Status Blocks(const v1::BlockList& blocks, const At& at) {
    RETURN_IF_ERROR(Array(blocks.indptr(), {&at, "indptr"}));
    RETURN_IF_ERROR(Array(blocks.indices(), {&at, "indices"}));
    RETURN_IF_ERROR(Expr(blocks.partial_expr(), {&at, "partial_expr"}));
    RETURN_IF_ERROR(Array(blocks.bitmap_of(), {&at, "bitmap_of"}));
    RETURN_IF_ERROR(Bytes(blocks.kind_bytes(), blocks.kind(), {&at, "kind_bytes"}));
    return Bytes(blocks.bitmaps_bytes(), blocks.bitmaps(), {&at, "bitmaps_bytes"});
  }

  absl::Status Expr(const v1::Expr& expr, const At& at) {
    switch (expr.op_case()) {
      case v1::Expr::kAllOf:
        return Operands(expr.all_of(), {&at, "all_of"});
      case v1::Expr::kAnyOf:
        return Operands(expr.any_of(), {&at, "any_of"});
      case v1::Expr::kNegate:
        return Expr(expr.negate(), {&at, "negate"});
      case v1::Expr::kRandom:
        return Expr(expr.random().exclude(), {&at, "random.exclude"});
      case v1::Expr::kGroups: {
        const At groups = {&at, "groups"};
        RETURN_IF_ERROR(Array(expr.groups().row(), {&groups, "row"}));
        return Array(expr.groups().key(), {&groups, "key"});
      }
      default:
        return absl::OkStatus();
    }
  }

  absl::Status Operands(const v1::ExprList& list, const At& at) {
    for (int n = 0; n < list.e_size(); ++n) RETURN_IF_ERROR(Expr(list.e(n), {&at, "e", n}));
    return absl::OkStatus();
  }

  absl::Status Array(const v1::MaskArray& array, const At& at) {
    inline_numbers_ += array.value_size();
    if (array.count() == 0) return absl::OkStatus();
    const uint32_t width = array.entry_bytes();
    if (width != 1 && width != 2 && width != 4) {
      return BadDataField(At{&at, "entry_bytes"}.Text(), "1, 2 or 4", absl::StrCat(width));
    }
    const bool is_given_inside = array.value_size() > 0 || !array.data().empty();
    if (is_given_inside) return Both({&at, "count"});
    Add(array.count(), width);
    return absl::OkStatus();
  }

  absl::Status Bytes(uint64_t bytes, const std::string& inside, const At& at) {
    if (bytes == 0) return absl::OkStatus();
    if (!inside.empty()) return Both(at);
    Add(bytes, 1);
    return absl::OkStatus();
  }

  static absl::Status Both(const At& at) {
    return BadDataField(at.Text(), "a list inside the mask or in mask_data", "both");
  }

  void Add(uint64_t count, uint32_t width) {
    if (count > kMaxCount || total_ >= kBeyondAllLimits) {
      total_ = kBeyondAllLimits;
    } else {
      total_ = RoundUp(total_, kMaskDataAlignment) + static_cast<int64_t>(count * width);
    }
  }

  const At mask_ = {nullptr, "problem.mask"};
  int64_t total_ = 0, inline_numbers_ = 0;
};

}  // namespace

absl::StatusOr<int64_t> MaskDataBytes(const v1::MaskSpec& wire) {
  Sizes sizes;
  RETURN_IF_ERROR(sizes.Walk(wire));
  return sizes.Total();
}

std::vector<uint32_t> NumbersOf(absl::string_view bytes, size_t width) {
  std::vector<uint32_t> numbers(bytes.size() / width);
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  for (uint32_t& number : numbers) {
    number = 0;
    for (size_t n = 0; n < width; ++n) number |= uint32_t{*at++} << (8 * n);
  }
  return numbers;
}

absl::string_view MaskDataReader::Next(uint64_t bytes) {
  const auto begin = std::min(static_cast<size_t>(RoundUp(at_, kMaskDataAlignment)), data_.size());
  const absl::string_view list = data_.substr(begin, bytes);
  at_ = static_cast<int64_t>(begin + list.size());
  return list;
}

void MaskDataWriter::Add(absl::string_view bytes) {
  data_.resize(
      static_cast<size_t>(RoundUp(static_cast<int64_t>(data_.size()), kMaskDataAlignment)));
  data_.append(bytes.data(), bytes.size());
}

}  // namespace attnd
