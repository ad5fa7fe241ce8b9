// Shared by tests of captured attention maps: a table of problems for every engine, a forward that
// has run and can be captured, and how far maps are apart.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "kernels/backend.h"

namespace attnd {

// A forward that has run, with its tensors: the same for the same problem and seed.
class CapturableForward {
 public:
  CapturableForward(Backend& backend, const Problem& problem, uint64_t seed)
      : backend_(backend), problem_(problem), in_(RandomInputs(problem, seed)) {
    o_ = Unwritten(problem_.OutputElements() * ElementBytes(problem_.element));
    lse_ = Unwritten(problem_.LseElements() * 4);
    workspace_ = AlignedBytes(backend_.WorkspaceBytes(problem_, Direction::kForward));
    call_.problem = &problem_;
    call_.q = in_.q.data(), call_.k = in_.k.data(), call_.v = in_.v.data();
    call_.mask_bits = in_.mask_bits.as<uint8_t>(), call_.bias = in_.bias.data();
    call_.o = o_.data(), call_.lse = lse_.as<float>();
    call_.workspace = workspace_.data();
    const auto report = backend_.Forward({&call_, 1});
    EXPECT_TRUE(report.ok()) << report.status();
  }

  CapturedMap Capture(const CaptureRequest& request) {
    auto captured = backend_.Capture(call_, request);
    EXPECT_TRUE(captured.ok()) << captured.status();
    return captured.ok() ? *std::move(captured) : CapturedMap{};
  }

 private:
  Backend& backend_;
  Problem problem_;
  ProblemInputs in_;
  AlignedBytes o_, lse_, workspace_;
  ForwardCall call_;
};

inline Problem DenseProblem(int64_t batch, int64_t heads, int64_t rows, int64_t keys,
                            ElementType element) {
  Problem p;
  p.batch = batch;
  p.q_heads = p.kv_heads = heads;
  p.q_len = rows;
  p.kv_len = keys;
  p.qk_head_dim = p.v_head_dim = 32;
  p.element = element;
  return p;
}

// The largest |got − want| over want, entries below `floor` counted as it.
inline double RelativeError(const std::vector<float>& got, const std::vector<float>& want,
                            double floor) {
  EXPECT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t n = 0; n < std::min(got.size(), want.size()); ++n) {
    worst = std::max(worst, std::abs(double{got[n]} - want[n]) / std::max<double>(want[n], floor));
  }
  return worst;
}

struct CaptureCase {
  std::string name;
  Problem problem;
  int64_t block;
};

// Over several of the engines' tiles in both directions.
inline std::vector<CaptureCase> CaptureCases(ElementType element) {
  std::vector<CaptureCase> cases;
  cases.push_back({"dense", DenseProblem(3, 2, 300, 300, element), 32});
  cases.push_back({"square", DenseProblem(2, 2, 256, 256, element), 64});
  cases.push_back({"more keys than rows", DenseProblem(2, 2, 130, 270, element), 16});
  cases.push_back({"blocks over tiles", DenseProblem(1, 1, 280, 530, element), 96});
  cases.push_back({"one block", DenseProblem(1, 1, 140, 260, element), 300});
  Problem wide = DenseProblem(1, 2, 70, 90, element);
  wide.qk_head_dim = 256;
  wide.v_head_dim = 24;
  cases.push_back({"wide heads", wide, 8});
  Problem causal = DenseProblem(2, 4, 257, 257, element);
  causal.causal = true;
  causal.kv_heads = 2;
  cases.push_back({"causal, grouped heads", causal, 32});
  Problem padded = DenseProblem(3, 2, 200, 300, element);
  padded.kv_lengths = {300, 17, 0};
  cases.push_back({"lengths", padded, 32});
  Problem rest = DenseProblem(2, 2, 160, 160, element);
  rest.window_left = 10;
  rest.window_right = 0;
  rest.alignment = Alignment::kTopLeft;
  rest.denominator = DenominatorKind::kZeroRest;
  cases.push_back({"window, rest counted as 0", rest, 32});
  Problem dropped = DenseProblem(2, 2, 160, 160, element);
  dropped.dropout = {.threshold = 64, .seed = 7, .offset = 3};
  cases.push_back({"dropout", dropped, 32});
  return cases;
}

// Each that the engine supports against the float64 reference: pooled averages and moments within
// `error` of the numbers, map entries, which are made of few, within ten times that. Returns how
// many.
int CheckCaptures(Backend& backend, const std::vector<CaptureCase>& cases, double error);

// Random problems of an element, every option among them, the same way.
void CheckRandomCaptures(Backend& backend, ElementType element, uint64_t seeds, int64_t max_pairs,
                         double error);

}  // namespace attnd
