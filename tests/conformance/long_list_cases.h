// Masks whose lists the cuda engine cuts into runs (kernels/rules/list_runs.h): one line of forward
// or backward is much longer than the others. Pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/conformance/residue_case.h"

namespace attnd {

// Some rows see all keys, some keys are seen by all rows, others by near ones.
inline MaskExpr Longformer(const Problem& p) {
  const auto first = static_cast<uint32_t>(std::max<int64_t>(0, p.kv_len - p.q_len));
  return Any({Window(40, 40), Leaf(Global{{first + 3}, {first + 20}, GlobalDirection::kRows}),
              Leaf(Global{{2}, {9}, GlobalDirection::kColumns})});
}

inline Problem LongLists(
    int64_t q_len, int64_t kv_len, const std::function<void(Problem&)>& set = [](Problem&) {}) {
  Problem p = Sized(q_len, kv_len);
  p.batch = 1;
  set(p);
  SetMask(Longformer(p), p);
  return p;
}

// Forward's lists are long where keys are many, backward's where rows are.
inline std::vector<ConformanceCase> LongListCases(ElementType element) {
  std::vector<ConformanceCase> cases = {
      {"rows", LongLists(1100, 8300)},
      {"keys", LongLists(8300, 1100)},
      {"rows_dropped_with_sink_and_lengths",
       LongLists(1100, 8300,
                 [](Problem& p) {
                   p.dropout = {.threshold = 77, .seed = 5, .offset = 3};
                   p.denominator = DenominatorKind::kSink;
                   p.sink_logits = {0.5f, 3};
                   p.kv_lengths = {8200};
                 })},
      {"keys_dropped_causal", LongLists(8300, 1100,
                                        [](Problem& p) {
                                          p.dropout = {.threshold = 77, .seed = 5, .offset = 3};
                                          p.causal = true;
                                        })},
  };
  for (ConformanceCase& c : cases) {
    c.problem.element = element;
    c.brief = true;
  }
  return cases;
}

}  // namespace attnd
