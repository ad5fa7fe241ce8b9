// The table of named conformance cases: each option alone, the edges of tiles, and the combinations
// that have broken published kernels.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/conformance/conformance_masks.h"
#include "tests/conformance/conformance_special.h"

namespace attnd {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Two query heads on one key head, lengths that no tile divides.
Problem Plain() {
  Problem p;
  p.batch = 1;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = 33;
  p.kv_len = 47;
  p.qk_head_dim = p.v_head_dim = 16;
  return p;
}

Problem Sized(int64_t q_len, int64_t kv_len, int64_t dim) {
  Problem p = Plain();
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = dim;
  return p;
}

Problem CausalAt(Problem p, Alignment alignment) {
  p.causal = true;
  p.alignment = alignment;
  return p;
}

Problem Windowed(int64_t left, int64_t right, Alignment alignment) {
  Problem p = Plain();
  p.window_left = left;
  p.window_right = right;
  p.alignment = alignment;
  return p;
}

Problem Packed(Layout layout, std::vector<int32_t> cu_q, std::vector<int32_t> cu_k) {
  Problem p = Plain();
  p.layout = layout;
  p.batch = static_cast<int64_t>(cu_q.size()) - 1;
  p.q_len = cu_q.back();
  p.kv_len = cu_k.back();
  p.cu_seqlens_q = std::move(cu_q);
  p.cu_seqlens_k = std::move(cu_k);
  return p;
}

// Table: collects cases; an "in each element" case stands three times.
class Table {
 public:
  void Add(const std::string& name, const Problem& problem, Values values = Values::kNormal) {
    cases_.push_back({name, problem, values});
  }
  void AddInEachElement(const std::string& name, Problem problem, Values values = Values::kNormal) {
    for (ElementType element :
         {ElementType::kFloat16, ElementType::kBFloat16, ElementType::kFloat32}) {
      problem.element = element;
      Add(absl::StrCat(name, "_", absl::string_view(ElementName(element))), problem, values);
    }
  }
  // Elements take turns, so that a long list costs one case an entry.
  void AddInSomeElement(const std::string& name, Problem problem, Values values = Values::kNormal) {
    problem.element = static_cast<ElementType>(1 + turn_++ % 3);
    Add(absl::StrCat(name, "_", absl::string_view(ElementName(problem.element))), problem, values);
  }
  void AddPoisoned(const std::string& name, Problem problem, Poison poison, float value) {
    problem.element = static_cast<ElementType>(1 + turn_++ % 3);
    cases_.push_back({absl::StrCat(name, "_", absl::string_view(ElementName(problem.element))),
                      problem, Values::kNormal, poison, value});
  }
  std::vector<ConformanceCase> Take() { return std::move(cases_); }

 private:
  std::vector<ConformanceCase> cases_;
  int turn_ = 0;
};

void AddLengths(Table& table) {
  static constexpr int64_t kPairs[][2] = {
      {1, 1},    {1, 33},   {1, 64},    {1, 257},   {31, 31},  {32, 32},   {33, 33},   {31, 65},
      {63, 63},  {64, 64},  {65, 65},   {64, 63},   {65, 1},   {127, 31},  {128, 128}, {129, 129},
      {17, 127}, {61, 129}, {129, 257}, {257, 129}, {191, 97}, {320, 320}, {512, 300}};
  for (const auto& [q_len, kv_len] : kPairs) {
    std::string name = absl::StrCat("lengths_", q_len, "_", kv_len);
    int64_t dim = std::max(q_len, kv_len) > 150 ? 64 : 32;
    table.AddInSomeElement(name, Sized(q_len, kv_len, dim));
    table.AddInSomeElement(absl::StrCat("causal_bottom_right_", name),
                           CausalAt(Sized(q_len, kv_len, dim), Alignment::kBottomRight));
    table.AddInSomeElement(absl::StrCat("causal_top_left_", name),
                           CausalAt(Sized(q_len, kv_len, dim), Alignment::kTopLeft));
  }
}

void AddLongRows(Table& table) {
  table.AddInEachElement("long_row", Sized(1, 20001, 16));
  table.AddInSomeElement("long_columns", Sized(20001, 3, 16));
  Problem rising = Sized(2, 5000, 16);  // each tile has a larger maximum than the one before
  rising.alignment = Alignment::kOffsets;
  rising.offsets = {5000};
  rising.alibi_slopes = {0.01f, 0.5f};
  table.AddInEachElement("long_row_with_rising_scores", rising);
}

void AddHeadDims(Table& table) {
  for (int64_t dim : {1,  2,  3,  7,  8,  15,  16,  17,  24,  31,  32,  33,  40,  48,  63,
                      64, 65, 72, 80, 96, 100, 112, 127, 128, 129, 160, 192, 224, 255, 256}) {
    table.AddInSomeElement(absl::StrCat("head_dim_", dim), Sized(19, 37, dim));
  }
  static constexpr int64_t kPairs[][2] = {{1, 256},  {256, 1},  {32, 64},   {64, 32}, {192, 128},
                                          {128, 64}, {40, 128}, {255, 129}, {7, 3},   {96, 256}};
  for (const auto& [qk_dim, v_dim] : kPairs) {
    Problem p = CausalAt(Sized(35, 41, qk_dim), Alignment::kBottomRight);
    p.v_head_dim = v_dim;
    table.AddInSomeElement(absl::StrCat("head_dims_", qk_dim, "_", v_dim), p);
  }
  // Logits of ±30: row maxima go on growing from tile to tile.
  for (int64_t dim : {32, 64, 96, 128, 256}) {
    Problem p = Sized(70, 90, dim);
    p.scale = 10 / std::sqrt(static_cast<float>(dim));
    table.AddInSomeElement(absl::StrCat("growing_maxima_", dim), p);
  }
  for (int64_t dim : {64, 128}) {  // the usual sizes, in each element
    table.AddInEachElement(absl::StrCat("usual_", dim), Sized(70, 90, dim));
    table.AddInEachElement(absl::StrCat("usual_causal_", dim),
                           CausalAt(Sized(90, 90, dim), Alignment::kTopLeft));
  }
}

void AddHeadsAndLayouts(Table& table) {
  static constexpr int64_t kHeads[][2] = {{1, 1}, {4, 4}, {4, 2}, {8, 1}, {6, 3}};
  for (const auto& [q_heads, kv_heads] : kHeads) {
    for (Layout layout : {Layout::kBhld, Layout::kBlhd}) {
      Problem p = CausalAt(Sized(19, 37, 16), Alignment::kBottomRight);
      p.batch = 2;
      p.q_heads = q_heads;
      p.kv_heads = kv_heads;
      p.layout = layout;
      table.AddInSomeElement(absl::StrCat(layout == Layout::kBhld ? "bhld" : "blhd", "_heads_",
                                          q_heads, "_", kv_heads),
                             p);
    }
  }
}

void AddDiagonals(Table& table) {
  for (Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight}) {
    std::string name = alignment == Alignment::kTopLeft ? "top_left" : "bottom_right";
    table.AddInEachElement("causal_" + name, CausalAt(Plain(), alignment));
    table.AddInSomeElement("causal_more_queries_" + name, CausalAt(Sized(47, 33, 16), alignment));
    for (const auto& [left, right] :
         {std::pair{0, 0}, {5, 0}, {0, 5}, {3, 7}, {-1, 2}, {2, -1}, {100, 100}}) {
      table.AddInSomeElement(absl::StrCat("window_", left < 0 ? "none" : absl::StrCat(left), "_",
                                          right < 0 ? "none" : absl::StrCat(right), "_", name),
                             Windowed(left, right, alignment));
    }
    Problem both = Windowed(9, 4, alignment);
    both.causal = true;
    table.AddInSomeElement("causal_and_window_" + name, both);
  }
  for (int32_t offset : {-100, -20, -1, 0, 1, 13, 46, 47, 100, 1 << 20, -(1 << 20)}) {
    Problem p = CausalAt(Plain(), Alignment::kOffsets);
    p.offsets = {offset};
    table.AddInSomeElement(
        absl::StrCat("causal_offset_", offset < 0 ? "minus_" : "", std::abs(offset)), p);
    p.causal = false;
    p.window_left = 6;
    p.window_right = 2;
    table.AddInSomeElement(
        absl::StrCat("window_offset_", offset < 0 ? "minus_" : "", std::abs(offset)), p);
  }
  Problem per_batch = CausalAt(Plain(), Alignment::kOffsets);
  per_batch.batch = 3;
  per_batch.offsets = {-10, 14, 40};
  table.AddInSomeElement("causal_offsets_per_batch", per_batch);
  Problem long_window = Sized(300, 300, 32);
  long_window.window_left = 40;
  long_window.window_right = 0;
  table.AddInEachElement("window_skips_whole_tiles", long_window);
}

void AddLengthsPerEntry(Table& table) {
  for (bool causal : {false, true}) {
    std::string name = causal ? "causal_kv_lengths" : "kv_lengths";
    Problem p = Plain();
    p.batch = 5;
    p.kv_lengths = {0, 1, 32, 33, 47};
    p.causal = causal;
    p.alignment = Alignment::kBottomRight;
    table.AddInEachElement(name, p);
    p.layout = Layout::kBlhd;
    table.AddInSomeElement(name + "_blhd", p);
    p.alignment = Alignment::kTopLeft;
    table.AddInSomeElement(name + "_top_left", p);
  }
  for (Layout layout : {Layout::kPackedThd, Layout::kPackedHtd}) {
    std::string name = layout == Layout::kPackedThd ? "packed_thd" : "packed_htd";
    Problem p = Packed(layout, {0, 33, 33, 34, 100}, {0, 20, 40, 41, 110});
    table.AddInEachElement(name, p);
    table.AddInSomeElement(name + "_causal", CausalAt(p, Alignment::kBottomRight));
    table.AddInSomeElement(name + "_causal_top_left", CausalAt(p, Alignment::kTopLeft));
    Problem empty = Packed(layout, {0, 0, 31, 64, 64}, {0, 17, 17, 80, 80});
    table.AddInSomeElement(name + "_empty_sequences", CausalAt(empty, Alignment::kBottomRight));
    Problem offsets = CausalAt(p, Alignment::kOffsets);
    offsets.offsets = {0, 3, -1, 20};
    table.AddInSomeElement(name + "_offsets", offsets);
    Problem masked = p;
    masked.bool_mask = BoolMask{{4, 2, p.MaxQueryLength(), p.MaxKeyLength()}};
    masked.bias = Bias{ElementType::kFloat32, {1, 2, p.MaxQueryLength(), p.MaxKeyLength()}, true};
    table.AddInSomeElement(name + "_mask_and_bias", masked);
    Problem grouped = CausalAt(p, Alignment::kBottomRight);
    grouped.q_heads = 6;
    grouped.kv_heads = 2;
    grouped.dropout = {50, 9, 8};
    table.AddInSomeElement(name + "_grouped_dropout", grouped);
  }
}

void AddMasksAndBiases(Table& table) {
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    Problem p = Plain();
    p.batch = 2;
    BroadcastShape shape = {broadcast & 1 ? 2 : 1, broadcast & 2 ? 2 : 1, broadcast & 4 ? 33 : 1,
                            broadcast & 8 ? 47 : 1};
    std::string name =
        absl::StrCat(shape.batch, "_", shape.heads, "_", shape.rows, "_", shape.columns);
    p.bool_mask = BoolMask{shape};
    table.AddInSomeElement("bool_mask_" + name, p);
    p.bool_mask.reset();
    p.bias = Bias{static_cast<ElementType>(1 + broadcast % 3), shape, true};
    table.AddInSomeElement("bias_" + name, p);
  }
  for (int64_t dim : {16, 80, 200}) {
    Problem p = Sized(100, 200, dim);
    p.bool_mask = BoolMask{{1, 2, 100, 200}};
    table.AddInSomeElement(absl::StrCat("bool_mask_tiles_", dim), p);
    p = CausalAt(p, Alignment::kBottomRight);
    p.window_left = 120;
    p.kv_lengths = {180};
    p.bool_mask = BoolMask{{1, 1, 100, 200}};
    p.denominator = DenominatorKind::kZeroRest;
    table.AddInSomeElement(absl::StrCat("bool_mask_tiles_cut_", dim), p);
  }
  Problem all = CausalAt(Plain(), Alignment::kBottomRight);
  all.batch = 2;
  all.window_left = 30;
  all.kv_lengths = {40, 13};
  all.bool_mask = BoolMask{{2, 1, 1, 47}};
  all.bias = Bias{ElementType::kFloat16, {1, 2, 33, 47}, true};
  table.AddInEachElement("all_masks_together", all);
  Problem forward_bias = Plain();
  forward_bias.bias = Bias{ElementType::kBFloat16, {1, 2, 33, 47}, false};
  table.AddInSomeElement("bias_without_gradient", forward_bias);
}

void AddScoreOptions(Table& table) {
  for (float scale : {0.0f, -0.5f, 1.0f, 3.0f}) {
    Problem p = Plain();
    p.scale = scale;
    table.AddInSomeElement(
        absl::StrCat("scale_", scale < 0 ? "minus_" : "", static_cast<int>(std::abs(scale) * 10)),
        p);
  }
  for (float softcap : {0.5f, 5.0f, 50.0f}) {
    Problem p = CausalAt(Plain(), Alignment::kBottomRight);
    p.softcap = softcap;
    p.scale = 1.0f;
    table.AddInEachElement(absl::StrCat("softcap_", static_cast<int>(softcap * 10)), p);
  }
  Problem alibi = CausalAt(Plain(), Alignment::kBottomRight);
  alibi.batch = 2;
  alibi.alibi_slopes = {0.5f, 0.0625f};
  table.AddInSomeElement("alibi_per_head", alibi);
  alibi.alibi_slopes = {0.5f, 0.0625f, 1.0f, -0.25f};
  table.AddInSomeElement("alibi_per_batch", alibi);
  alibi.causal = false;
  table.AddInSomeElement("alibi_both_sides", alibi);
  Problem everything = alibi;
  everything.softcap = 10;
  everything.scale = -0.7f;
  everything.bias = Bias{ElementType::kFloat32, {2, 2, 33, 47}, true};
  everything.dropout = {26, 1, 2};
  table.AddInEachElement("softcap_bias_alibi_dropout", everything);
}

void AddSoftmaxOptions(Table& table) {
  for (bool causal : {false, true}) {
    std::string prefix = causal ? "causal_" : "";
    Problem p = Plain();
    p.causal = causal;
    p.alignment = Alignment::kBottomRight;
    Problem rest = p;
    rest.denominator = DenominatorKind::kZeroRest;
    rest.kv_lengths = {40};
    rest.bool_mask = BoolMask{{1, 1, 33, 47}};
    table.AddInEachElement(prefix + "zero_rest", rest);
    rest.window_left = 4;
    rest.scale = 8.0f;
    table.AddInSomeElement(prefix + "zero_rest_window_steep", rest);
    Problem sink = p;
    sink.denominator = DenominatorKind::kSink;
    sink.sink_logits = {1.5f, -2.0f};
    table.AddInEachElement(prefix + "sink", sink);
    sink.sink_logits = {80.0f, -200.0f};
    table.AddInSomeElement(prefix + "sink_extreme", sink);
  }
  // Scores far below zero: the rest's logit 0 or the sink, not a key's score, is the row's maximum.
  for (float slope : {0.05f, 0.3f}) {
    Problem low = Plain();
    low.alignment = Alignment::kOffsets;
    low.offsets = {1000};
    low.alibi_slopes = {slope, slope};
    low.bool_mask = BoolMask{{1, 1, 33, 47}};
    low.denominator = DenominatorKind::kZeroRest;
    std::string name = slope < 0.1f ? "above_scores" : "far_above_scores";
    table.AddInSomeElement("zero_rest_" + name, low);
    low.denominator = DenominatorKind::kSink;
    low.sink_logits = {0, 300};
    table.AddInSomeElement("sink_" + name, low);
    low.bool_mask.reset();  // all keys are seen: there is no rest
    low.denominator = DenominatorKind::kZeroRest;
    low.sink_logits.clear();
    table.AddInSomeElement("zero_rest_of_no_key_" + name, low);
  }
  Problem empty = CausalAt(Sized(47, 33, 16), Alignment::kBottomRight);  // 14 rows see nothing
  empty.denominator = DenominatorKind::kZeroRest;
  table.AddInSomeElement("zero_rest_with_empty_rows", empty);
  empty.denominator = DenominatorKind::kSink;
  empty.sink_logits = {0.5f, 1.0f};
  table.AddInSomeElement("sink_with_empty_rows", empty);
}

void AddDropout(Table& table) {
  for (uint32_t threshold : {1, 26, 128, 255}) {
    Problem p = CausalAt(Plain(), Alignment::kBottomRight);
    p.batch = 2;
    p.dropout = {threshold, 0x123456789abcdef0u, 0xfedcba9876543210u};
    table.AddInSomeElement(absl::StrCat("dropout_", threshold), p);
  }
  Problem p = Sized(70, 130, 64);
  p.dropout = {26, 42, 0};
  table.AddInEachElement("dropout_over_tiles", p);
  Problem shard = Plain();
  shard.dropout = {26, 42, 0};
  shard.batch = 2;
  shard.shard = {3, 5, 16};
  table.AddInSomeElement("dropout_of_a_shard", shard);
  shard.shard = {3, 5, 0};
  table.AddInSomeElement("dropout_of_the_last_shard", shard);
}

void AddExtremes(Table& table) {
  table.AddInEachElement("huge_logits", Sized(65, 70, 32), Values::kHuge);
  table.AddInEachElement("huge_logits_causal", CausalAt(Sized(65, 70, 64), Alignment::kBottomRight),
                         Values::kHuge);
  table.AddInSomeElement("uniform_values", Sized(129, 130, 64), Values::kUniform);
  table.AddInEachElement("large_gradients", Sized(65, 70, 64), Values::kLargeGradients);
  Problem grouped = CausalAt(Sized(40, 50, 32), Alignment::kBottomRight);
  grouped.batch = 2;
  grouped.q_heads = 6;
  grouped.kv_heads = 2;
  grouped.dropout = {230, 3, 4};
  grouped.bias = Bias{ElementType::kFloat32, {1, 6, 40, 50}, true};
  grouped.denominator = DenominatorKind::kSink;
  grouped.sink_logits = {0, 1, 2, 3, -1, -2};
  table.AddInEachElement("large_gradients_grouped_dropout", grouped, Values::kLargeGradients);
  Problem half = Sized(65, 70, 64);
  half.accumulate = AccumulateType::kFloat16;
  half.element = ElementType::kFloat16;
  table.Add("accumulate_f16", half);
  Problem no_keys = CausalAt(Plain(), Alignment::kOffsets);
  no_keys.offsets = {-33};
  table.AddInEachElement("no_row_sees_a_key", no_keys);
  no_keys.denominator = DenominatorKind::kZeroRest;
  table.AddInSomeElement("no_row_sees_a_key_zero_rest", no_keys);
  Problem one = Sized(1, 1, 1);
  one.q_heads = 1;
  table.AddInEachElement("one_of_everything", one);
  Problem nondeterministic = Sized(129, 65, 64);
  nondeterministic.allow_nondeterministic = true;
  table.AddInSomeElement("nondeterminism_allowed", nondeterministic);
}

void AddPoisons(Table& table) {
  Problem plain = Plain();
  plain.batch = 2;
  struct Place {
    const char* name;
    Poison poison;
  } places[] = {{"query", Poison::kQuery},
                {"key", Poison::kKey},
                {"value", Poison::kValue},
                {"output_gradient", Poison::kOutputGradient}};
  for (const Place& place : places) {
    table.AddPoisoned(absl::StrCat("nan_surfaces_from_", place.name), plain, place.poison, kNan);
    table.AddPoisoned(absl::StrCat("infinity_surfaces_from_", place.name), plain, place.poison,
                      kInfinity);
  }
  Problem bias = plain;
  bias.bias = Bias{ElementType::kFloat32, {2, 2, 33, 47}, true};
  table.AddPoisoned("nan_surfaces_from_bias", bias, Poison::kBias, kNan);
  table.AddPoisoned("infinity_surfaces_from_bias", bias, Poison::kBias, kInfinity);
  Problem causal = CausalAt(plain, Alignment::kBottomRight);
  Problem window = Windowed(6, 3, Alignment::kBottomRight);
  for (const Place& place : {places[1], places[2]}) {
    table.AddPoisoned(absl::StrCat("nan_stays_with_its_rows_causal_", place.name), causal,
                      place.poison, kNan);
    table.AddPoisoned(absl::StrCat("infinity_stays_with_its_rows_causal_", place.name), causal,
                      place.poison, kInfinity);
    table.AddPoisoned(absl::StrCat("nan_stays_with_its_rows_window_", place.name), window,
                      place.poison, kNan);
  }
  Problem softcap = plain;  // an infinite score is at the cap, where its gradient is a zero
  softcap.softcap = 2;
  for (const Place& place : {places[0], places[1]}) {
    table.AddPoisoned(absl::StrCat("infinity_surfaces_through_softcap_from_", place.name), softcap,
                      place.poison, kInfinity);
  }
}

}  // namespace

std::vector<ConformanceCase> NamedConformanceCases() {
  Table table;
  AddLengths(table);
  AddLongRows(table);
  AddHeadDims(table);
  AddHeadsAndLayouts(table);
  AddDiagonals(table);
  AddLengthsPerEntry(table);
  AddMasksAndBiases(table);
  AddScoreOptions(table);
  AddSoftmaxOptions(table);
  AddDropout(table);
  AddExtremes(table);
  AddPoisons(table);
  std::vector<ConformanceCase> cases = table.Take();
  for (ConformanceCase& special : SpecialValueCases()) cases.push_back(std::move(special));
  for (ConformanceCase& masked : MaskCases()) cases.push_back(std::move(masked));
  return cases;
}

std::vector<ConformanceCase> RandomConformanceCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases;
  for (int n = 0; n < options.random_problems; ++n) {
    uint64_t seed = options.random_seed * 1000003 + n;
    RandomProblemLimits limits{.max_pairs = options.random_max_pairs};
    cases.push_back({absl::StrCat("random_seed_", seed), RandomProblem(seed, limits)});
  }
  return cases;
}

}  // namespace attnd
