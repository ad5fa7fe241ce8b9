#include "tests/conformance/conformance_special.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

constexpr float kSpecialNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSpecialInfinity = std::numeric_limits<float>::infinity();

struct Named {
  const char* name;
  Problem problem;
};

Problem PlainSpecial() {
  Problem p;
  p.batch = 2;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = 31;
  p.kv_len = 45;
  p.qk_head_dim = p.v_head_dim = 16;
  return p;
}

Problem PackedSpecial() {
  Problem p = PlainSpecial();
  p.layout = Layout::kPackedThd;
  p.batch = 3;
  p.cu_seqlens_q = {0, 16, 31, 62};
  p.cu_seqlens_k = {0, 22, 45, 90};
  p.q_len = 62;
  p.kv_len = 90;
  return p;
}

Problem CausalTopLeft(Problem p) {
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  return p;
}

// All that hides keys, each alone; in the last the later rows see nothing.
std::vector<Named> Hidings() {
  std::vector<Named> all = {{"none", PlainSpecial()}, {"causal", CausalTopLeft(PlainSpecial())}};
  Problem window = PlainSpecial();
  window.window_left = 6;
  window.window_right = 3;
  window.alignment = Alignment::kBottomRight;
  all.push_back({"window", window});
  Problem lengths = PlainSpecial();
  lengths.kv_lengths = {45, 31};
  all.push_back({"kv_lengths", lengths});
  Problem mask = PlainSpecial();
  mask.bool_mask = BoolMask{{2, 1, 31, 45}};
  all.push_back({"bool_mask", mask});
  Problem bias = PlainSpecial();
  bias.bias = Bias{ElementType::kFloat32, {2, 2, 31, 45}, true};
  all.push_back({"bias", bias});
  all.push_back({"packed", PackedSpecial()});
  all.push_back({"packed_causal", CausalTopLeft(PackedSpecial())});
  Problem empty = PlainSpecial();
  empty.window_left = 15;
  empty.window_right = 2;
  empty.alignment = Alignment::kOffsets;
  empty.offsets = {34};
  all.push_back({"empty_rows", empty});
  return all;
}

struct Place {
  const char* name;
  Poison poison;
};
constexpr Place kPlaces[] = {{"query", Poison::kQuery},
                             {"key", Poison::kKey},
                             {"value", Poison::kValue},
                             {"output_gradient", Poison::kOutputGradient},
                             {"lse_gradient", Poison::kLseGradient},
                             {"bias", Poison::kBias}};

struct Value {
  const char* name;
  float value;
};
constexpr Value kValues[] = {{"nan", kSpecialNan},
                             {"infinity", kSpecialInfinity},
                             {"minus_infinity", -kSpecialInfinity},
                             {"huge", 65504}};

// The n-th of twelve: with a softcap or not, dropout or not, and each denominator.
void ChooseOptions(int n, ConformanceCase& c) {
  Problem& p = c.problem;
  if (n % 2 == 1) {
    p.softcap = 2;
    c.name += "_softcap";
  }
  if (n / 2 % 2 == 1) {
    p.dropout = {50, 9, 8};
    c.name += "_dropout";
  }
  if (n / 4 == 1) {
    p.denominator = DenominatorKind::kSink;
    p.sink_logits = {1.5f, -2.0f};
    c.name += "_sink";
  } else if (n / 4 == 2) {
    p.denominator = DenominatorKind::kZeroRest;
    c.name += "_zero_rest";
  }
}

}  // namespace

// Each way of hiding keys with each value in each input. Options, elements, and whether one number
// or a row is poisoned, take turns.
std::vector<ConformanceCase> SpecialValueCases() {
  std::vector<ConformanceCase> cases;
  int n = 0;
  for (const Named& hiding : Hidings()) {
    for (const Place& place : kPlaces) {
      if (place.poison == Poison::kBias && !hiding.problem.bias) continue;
      for (const Value& value : kValues) {
        ConformanceCase c;
        c.name = absl::StrCat(value.name, "_in_", place.name, "_", hiding.name);
        c.problem = hiding.problem;
        ChooseOptions(n * 5 % 12, c);
        c.problem.element = static_cast<ElementType>(1 + n % 3);
        c.poison = place.poison;
        c.poison_value = value.value;
        // With one huge number in K, the cuda engine's fixed point keeps too little of the rest;
        // with a huge row of dO a dS in plain float16, which engines may use, is infinite.
        const bool is_huge = value.value == 65504;
        c.poisons_row = is_huge ? place.poison == Poison::kKey : n / 2 % 2 == 1;
        c.poison_eighths = n / 3 % 2 == 1 ? 5 : 7;
        c.brief = true;
        absl::StrAppend(&c.name, "_", absl::string_view(ElementName(c.problem.element)));
        cases.push_back(c);
        ++n;
      }
    }
    ++n;  // so that the turns meet each value and place
  }
  return cases;
}

}  // namespace attnd
