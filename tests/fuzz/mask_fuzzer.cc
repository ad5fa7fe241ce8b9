// Any bytes → a mask that is refused by name, or that the compiler and the oracle see alike. Bytes
// choose a random mask, then change numbers in it: libFuzzer's entry.
//
//   tests/fuzz/fuzz_masks.sh -max_total_time=60      the same with a seeded generator's bytes:
//   //tests/fuzz:mask_fuzzer_test
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "tests/masks/mask_comparison.h"
#include "attention/masks/mask_description.h"
#include "attention/masks/random_mask.h"
#include "base/check.h"
#include "tests/fuzz/choices.h"

namespace attnd {
namespace {

// Changes numbers of a mask without a thought for what it means.
class Spoiler {
 public:
  explicit Spoiler(Choices& choices) : choices_(choices) {}

  void Spoil(MaskSpec& spec) {
    for (int64_t times = choices_.Between(0, 3); times > 0; --times) {
      const int64_t last = static_cast<int64_t>(spec.pattern.size()) - 1;
      MaskPattern& pattern = spec.pattern[static_cast<size_t>(choices_.Between(0, last))];
      std::visit([&](auto& kind) { Change(kind); }, pattern);
      if (choices_.Between(0, 7) == 0) Change(spec.pattern_of);
    }
  }

 private:
  template <class T>
  void Number(T& value) {
    constexpr int64_t kOdd[] = {-1, 0, 1, 8, INT32_MAX, INT32_MIN, UINT32_MAX, 1 << 20};
    const int64_t which = choices_.Between(0, 15);
    value = static_cast<T>(which < 8 ? kOdd[which] : choices_.Between(0, 300));
  }
  template <class T>
  void Change(std::vector<T>& list) {
    if (choices_.Between(0, 7) == 0) {
      list.resize(static_cast<size_t>(choices_.Between(0, 400)));
    } else if (!list.empty()) {
      const int64_t last = static_cast<int64_t>(list.size()) - 1;
      Number(list[static_cast<size_t>(choices_.Between(0, last))]);
    }
  }
  // One of the fields.
  template <class... Fields>
  void OneOf(Fields&... fields) {
    int64_t which = choices_.Between(0, sizeof...(fields) - 1);
    ((which-- == 0 ? One(fields) : void()), ...);
  }
  template <class T>
  void One(T& field) {
    if constexpr (requires { field.size(); }) {
      Change(field);
    } else {
      Number(field);
    }
  }

  template <class Kind>
  void Change(Kind&) {}
  void Change(MaskExpr& expr) {
    if (!expr.of.empty() && choices_.Between(0, 2) > 0) {
      const int64_t last = static_cast<int64_t>(expr.of.size()) - 1;
      return Change(expr.of[static_cast<size_t>(choices_.Between(0, last))]);
    }
    std::visit([&](auto& op) { Change(op); }, expr.op);
  }
  void Change(RelativeWindow& e) { OneOf(e.left, e.right); }
  void Change(Dilated& e) { OneOf(e.step, e.left, e.right); }
  void Change(StrideRel& e) { OneOf(e.p, e.phase); }
  void Change(StrideCol& e) { OneOf(e.p, e.lo, e.hi); }
  void Change(BlockWindow& e) { OneOf(e.p, e.lo, e.hi, e.shift); }
  void Change(Global& e) { OneOf(e.start, e.end, e.direction); }
  void Change(Prefix& e) { Change(e.len); }
  void Change(Segment& e) { Change(e.cu); }
  void Change(Groups& e) { OneOf(e.row, e.key); }
  void Change(RandomBlocks& e) { OneOf(e.block, e.per_row, e.seed); }
  void Change(PatternRef& e) { Number(e.pattern); }
  void Change(BlockList& e) {
    OneOf(e.bq, e.bk, e.indptr, e.indices, e.kind, e.bitmaps, e.order, e.bitmap_of);
  }
  void Change(ColRuns& e) { OneOf(e.m, e.start, e.end); }
  void Change(RowRuns& e) { OneOf(e.r, e.first, e.stride, e.count); }
  void Change(RowIntervals& e) { OneOf(e.r, e.begin, e.end); }
  void Change(MaskRectangle& r) { OneOf(r.row_begin, r.row_end, r.key_begin, r.key_end, r.shape); }
  void Change(Rectangles& e) {
    if (!e.of.empty()) Change(e.of[0]);
  }
  void Change(MaskBitmap& e) { OneOf(e.row_pitch_bits, e.data); }

  Choices& choices_;
};

}  // namespace
}  // namespace attnd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attnd::Choices choices(data, size);
  attnd::RandomMaskCase c = attnd::RandomMask(
      [&](int64_t low, int64_t high) { return choices.Between(low, high); }, 40, 2000);
  attnd::Spoiler(choices).Spoil(c.spec);
  const absl::Status status = attnd::ValidateMask(c.spec, c.call);
  if (!status.ok()) {
    CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status;
    CHECK(status.message().find("problem.mask") == 0) << status;
    CHECK(status.message().find(": expected ") != std::string::npos) << status;
    return 0;
  }
  const std::string difference = attnd::CompareWithOracle(c.spec, c.call, {{16, 8}, {5, 37}});
  CHECK(difference.empty()) << difference;
  return 0;
}
