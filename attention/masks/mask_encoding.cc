#include "attention/masks/mask_encoding.h"

#include <openssl/evp.h>

#include <algorithm>

#include "base/check.h"

namespace attnd {
namespace {

class Encoder {
 public:
  explicit Encoder(const PatternNames& names) : names_(names) {}

  // ---- Fields.

  void Put(uint64_t value, int bytes) {
    char little[8];
    for (int n = 0; n < 8; ++n) little[n] = static_cast<char>(value >> 8 * n);
    bytes_.append(little, static_cast<size_t>(bytes));
  }
  void Put(const std::vector<uint32_t>& list) {
    const uint32_t most = list.empty() ? 0 : *std::max_element(list.begin(), list.end());
    const int width = most < 1 << 8 ? 1 : most < 1 << 16 ? 2 : 4;
    Put(list.size(), 8);
    Put(static_cast<uint64_t>(width), 1);
    for (uint32_t value : list) Put(value, width);
  }
  void Put(const std::vector<int32_t>& list) {
    Put(list.size(), 8);
    for (int32_t value : list) Put(static_cast<uint32_t>(value), 4);
  }
  void Put(const std::vector<uint8_t>& bytes) {
    Put(bytes.size(), 8);
    bytes_.append(bytes.begin(), bytes.end());
  }
  void Put(const std::optional<MaskExpr>& expr) {
    Put(expr.has_value() ? 1 : 0, 1);
    if (expr) Put(*expr);
  }

  // ---- Expressions.

  void Put(const MaskExpr& expr) {
    Put(expr.op.index(), 1);
    std::visit([&](const auto& op) { Fields(op); }, expr.op);
    Put(expr.of.size(), 8);
    for (const MaskExpr& operand : expr.of) Put(operand);
  }
  void Fields(const std::monostate&) {}
  void Fields(const AllKeys&) {}
  void Fields(const AllOf&) {}
  void Fields(const AnyOf&) {}
  void Fields(const Negate&) {}
  void Fields(const RelativeWindow& e) { Numbers({e.left, e.right}); }
  void Fields(const Dilated& e) { Numbers({e.step, e.left, e.right}); }
  void Fields(const StrideRel& e) { Numbers({e.p, e.phase}); }
  void Fields(const StrideCol& e) { Numbers({e.p, e.lo, e.hi}); }
  void Fields(const BlockWindow& e) {
    Numbers({e.p, e.lo, e.hi});
    Put(e.shift);
  }
  void Fields(const Global& e) {
    Put(e.start);
    Put(e.end);
    Put(static_cast<uint64_t>(e.direction), 1);
  }
  void Fields(const Prefix& e) { Put(e.len); }
  void Fields(const Segment& e) { Put(e.cu); }
  void Fields(const Groups& e) {
    Put(e.row);
    Put(e.key);
    Put(e.per_batch ? 1 : 0, 1);
  }
  void Fields(const RandomBlocks& e) {
    Numbers({e.block, e.per_row});
    Put(e.seed, 8);
    Put(e.per_head ? 1 : 0, 1);
  }
  void Fields(const PatternRef& e) {
    if (names_.empty()) return Put(e.pattern, 4);
    bytes_ += names_[e.pattern];
  }

  // ---- Lists.

  void Put(const MaskPattern& pattern) {
    Put(pattern.index(), 1);
    std::visit([&](const auto& kind) { Kind(kind); }, pattern);
  }
  void Kind(const std::monostate&) {}
  void Kind(const MaskExpr& expr) { Put(expr); }
  void Kind(const BlockList& list) {
    Numbers({list.bq, list.bk});
    Put(list.indptr);
    Put(list.indices);
    Put(list.kind);
    Put(list.bitmaps);
    Put(static_cast<uint64_t>(list.order), 1);
    Put(list.partial_expr);
    Put(list.bitmap_of);
  }
  void Kind(const ColRuns& runs) {
    Put(runs.m, 4);
    Put(runs.start);
    Put(runs.end);
    Put(runs.base);
  }
  void Kind(const RowRuns& runs) {
    Put(runs.r, 4);
    Put(runs.first);
    Put(runs.stride);
    Put(runs.count);
  }
  void Kind(const RowIntervals& runs) {
    Put(runs.r, 4);
    Put(runs.begin);
    Put(runs.end);
  }
  void Kind(const Rectangles& rectangles) {
    Put(rectangles.of.size(), 8);
    for (const MaskRectangle& r : rectangles.of) {
      Numbers({r.row_begin, r.row_end, r.key_begin, r.key_end});
      Put(static_cast<uint64_t>(r.shape), 1);
    }
  }
  void Kind(const MaskBitmap& bits) {
    Put(bits.row_pitch_bits, 4);
    Put(bits.data);
  }

  std::string Take() { return std::move(bytes_); }

 private:
  void Numbers(std::initializer_list<int64_t> values) {
    for (int64_t value : values) Put(static_cast<uint32_t>(value), 4);
  }

  const PatternNames& names_;
  std::string bytes_;
};

}  // namespace

std::string EncodeExpr(const MaskExpr& expr, const PatternNames& names) {
  Encoder encoder(names);
  encoder.Put(expr);
  return encoder.Take();
}

std::string EncodePattern(const MaskPattern& pattern, const PatternNames& names) {
  Encoder encoder(names);
  encoder.Put(pattern);
  return encoder.Take();
}

std::string EncodeMask(const MaskSpec& canonical) {
  const PatternNames numbers;
  Encoder encoder(numbers);
  const MaskExtents& extents = canonical.extents;
  for (int64_t size : {extents.batch, extents.q_heads, extents.rows, extents.keys}) {
    encoder.Put(static_cast<uint64_t>(size), 8);
  }
  encoder.Put(static_cast<uint64_t>(canonical.empty_row), 1);
  encoder.Put(canonical.pattern.size(), 8);
  for (const MaskPattern& pattern : canonical.pattern) encoder.Put(pattern);
  encoder.Put(canonical.pattern_of);
  return encoder.Take();
}

std::array<uint8_t, 32> Sha256(absl::string_view bytes) {
  std::array<uint8_t, 32> digest;
  CHECK(EVP_Digest(bytes.data(), bytes.size(), digest.data(), nullptr, EVP_sha256(), nullptr) == 1);
  return digest;
}

}  // namespace attnd
