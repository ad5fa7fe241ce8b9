// Results of an engine against the float64 reference, and the layers that tests of engines run.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "modules/known_layers.h"
#include "modules/reference/call_parts.h"
#include "tests/layers/engine_fixture.h"

namespace attnd {

inline double Largest(const Numbers& a) {
  double most = 0;
  for (double x : a) most = std::max(most, std::fabs(x));
  return most;
}

// Infinite where either has a NaN.
inline double Distance(const Numbers& a, const Numbers& b) {
  CHECK(a.size() == b.size());
  double most = 0;
  for (size_t n = 0; n < a.size(); ++n) {
    const double distance = std::fabs(a[n] - b[n]);
    most = std::max(most, std::isnan(distance) ? INFINITY : distance);
  }
  return most;
}

inline double UnitOf(ElementType element) {
  return element == ElementType::kFloat32    ? 0x1p-24
         : element == ElementType::kBFloat16 ? 0x1p-8
                                             : 0x1p-11;
}

// A value's error by rounding alone is what the reference shows when it rounds where the contract
// says, and is float64 between. An engine's sums are float32: a chain of n terms makes about √n
// roundings where the reference makes one, n ≤ 136 here, and functions make a few. So `factor`
// times as much where elements are float32; where they are 16 bits, float32 sums hardly show. Where
// the reference makes no error at all, a floor of a few roundings.
struct Bound {
  double factor, floor_units;
};
inline Bound BoundOf(ElementType element) {
  return element == ElementType::kFloat32 ? Bound{16, 32} : Bound{2, 8};
}

// Collects, over all tensors of a call, the errors over what is allowed. Differences that cancel,
// as those of a softmax over one key do in float64 but not in float32, leave errors of the size of
// what was subtracted: so each tensor is also held to the largest number of any gradient.
struct Comparison {
  int tensors = 0, close = 0;  // close: by its own size
  double most = 0;             // by the largest of all
};
// `honest`: runs that round where an engine may; a tensor's own error is the largest of theirs.
inline Comparison Compare(const ReferenceFixture::Results& engine,
                          const std::vector<ReferenceFixture::Results>& honest,
                          const ReferenceFixture::Results& exact, ElementType element,
                          const Bound& bound) {
  const auto tensors = [](const ReferenceFixture::Results& of) {
    std::vector<Numbers> all = of.gradients;
    all.insert(all.end(), {of.dx, of.d_memory, of.y});
    return all;
  };
  const std::vector<Numbers> a = tensors(engine), c = tensors(exact);
  std::vector<double> own(c.size());
  for (const ReferenceFixture::Results& run : honest) {
    const std::vector<Numbers> b = tensors(run);
    for (size_t n = 0; n < c.size(); ++n) {
      if (!c[n].empty()) own[n] = std::max(own[n], Distance(b[n], c[n]));
    }
  }
  const double unit = bound.floor_units * UnitOf(element);
  double largest = 0;
  for (const Numbers& tensor : c) largest = std::max(largest, Largest(tensor));
  Comparison result;
  for (size_t n = 0; n < a.size(); ++n) {
    const double error = c[n].empty() ? 0 : Distance(a[n], c[n]);
    const auto ratio = [&](double size) {
      return error / (bound.factor * own[n] + unit * (size + 1e-3));
    };
    const double by_own = ratio(Largest(c[n])), by_largest = ratio(largest);
    const bool cancels = Largest(c[n]) <= unit * largest;
    ++result.tensors;
    result.close += (cancels ? by_largest : by_own) <= 1;
    result.most = std::max(result.most, by_largest);
  }
  return result;
}

inline Comparison Compare(const ReferenceFixture::Results& engine,
                          const ReferenceFixture::Results& rounded,
                          const ReferenceFixture::Results& exact, ElementType element) {
  return Compare(engine, std::vector{rounded}, exact, element, BoundOf(element));
}

// Whether float32 can say anything: beyond, scores are so large that one rounding of them is a
// factor of a probability.
inline constexpr double kLargest = 1e5;
inline bool IsModerate(const ReferenceFixture::Results& results) {
  const auto moderate = [](const Numbers& numbers) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [](double x) { return std::fabs(x) <= kLargest; });
  };
  return moderate(results.y) && moderate(results.dx) && moderate(results.d_memory) &&
         std::all_of(results.gradients.begin(), results.gradients.end(), moderate);
}

struct BothReferences {
  ReferenceFixture::Results rounded, exact;
};
inline BothReferences References(const ReferenceFixture& fixture, const ModuleLayout& layout) {
  ReferenceFixture exact(layout, 1, Rounding::kExact);
  exact.weights = fixture.weights;
  exact.inputs = fixture.inputs;
  exact.dy = fixture.dy;
  return {fixture.Run(), exact.Run()};
}

struct NamedLayout {
  const char* name;
  ModuleLayout layout;
};
inline std::vector<NamedLayout> KnownLayouts(ElementType element) {
  LayerSizes sizes{.width = 48,
                   .heads = 4,
                   .kv_heads = 4,
                   .inner = 136,
                   .layers = 2,
                   .dropout = 26,
                   .element = element};
  LayerSizes grouped = sizes;
  grouped.kv_heads = 2;
  LayerSizes in_place =
      sizes;  // heads of whole 16 bytes, which attention reads and writes in columns
  in_place.heads = in_place.kv_heads = 3;
  return {{"bert", BertLayers(sizes)},
          {"gpt", GptLayers(sizes)},
          {"gpt in place", GptLayers(in_place)},
          {"llama", LlamaLayers(grouped)},
          {"decoder", DecoderLayers(sizes)}};
}

inline CallRows KnownRows(const ModuleLayout& layout, int64_t batch, int64_t length) {
  CallRows rows{.batch = batch, .length = length};
  if (layout.memory_width > 0) rows.memory_length = 5;
  return rows;
}

// `parts` calls of the fixture's sequences, with the gradients of all.
inline ReferenceFixture::Results InParts(EngineUnderTest& engine, const ReferenceFixture& fixture,
                                         int64_t parts) {
  const ModuleInputs& all = fixture.inputs;
  const int64_t width = fixture.graph().layout().width, length = all.rows.length;
  const int64_t batch = all.rows.batch / parts;
  ReferenceFixture::Results joined;
  for (int64_t first = 0; first < all.rows.batch; first += batch) {
    ModuleInputs part = all;
    part.rows = all.rows.Sequences(first, batch);
    part.x = Part(all.x, width, first * length, batch * length);
    const ReferenceFixture::Results one =
        engine.Run(part, Part(fixture.dy, width, first * length, batch * length));
    Append(one.y, joined.y);
    Append(one.dx, joined.dx);
    joined.gradients = one.gradients;
  }
  return joined;
}

inline OptimizerSpec AdamW() {
  return {.kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
}

}  // namespace attnd
