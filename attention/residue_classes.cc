#include "attention/residue_classes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "base/floor.h"

namespace attnd {
namespace {

absl::Status Unable(absl::string_view field, absl::string_view why) {
  return absl::UnimplementedError(absl::StrCat(field, ": ", why));
}

// How many of length 0 .. length − 1 are congruent to `residue`.
int64_t CountOf(int64_t length, int64_t residue, int64_t p) {
  return residue < length ? (length - residue + p - 1) / p : 0;
}

}  // namespace

int64_t ResidueClasses::Count(const Sequence& whole) const {
  return std::max<int64_t>(1, std::min(p, whole.q_len));
}

Sequence ResidueClasses::ClassAt(const Sequence& whole, int64_t residue) const {
  const int64_t key = FloorModulo(residue + whole.offset - phase, p);
  return {.q_begin = whole.q_begin + residue,
          .q_len = CountOf(whole.q_len, residue, p),
          .kv_begin = whole.kv_begin + key,
          .kv_len = CountOf(whole.kv_len, key, p),
          .offset = (residue + whole.offset - phase - key) / p + shift};
}

int64_t ResidueClasses::ResidueOfKey(const Sequence& whole, int64_t key) const {
  return FloorModulo(key - whole.offset + phase, p);
}

absl::StatusOr<ResidueClasses> ResidueClassesOf(const Problem& problem) {
  const auto form = ResidueFormOf(problem.mask->spec());
  if (!form) return Unable("problem.mask", "no stride or dilated window for all heads");
  if (problem.dropout.threshold > 0) return Unable("problem.dropout", "drawn for blocks of scores");
  if (problem.bias) return Unable("problem.bias", "not read in strides");
  if (problem.bool_mask) return Unable("problem.bool_mask", "not read in strides");
  if (!problem.alibi_slopes.empty())
    return Unable("problem.alibi_slopes", "counts whole distances");

  ResidueClasses classes = {.p = form->p, .phase = form->phase};
  // i + offset − j = phase + p·(r + m − t), m the class's own diagonal.
  const int64_t left = TighterBound(form->left, problem.window_left);
  const int64_t right = TighterBound(form->right, problem.causal ? 0 : problem.window_right);
  if (right >= 0) classes.window_right = (right + classes.phase) / classes.p;
  if (left >= 0) classes.window_left = FloorDivide(left - classes.phase, classes.p);
  if (left >= 0 && classes.window_left < 0) {  // the nearest key lies behind the diagonal
    if (right >= 0 && classes.window_right == 0) return Unable("problem.mask", "shows nothing");
    classes.window_left = 0;
    classes.shift = 1;
    if (right >= 0) --classes.window_right;
  }
  return classes;
}

}  // namespace attnd
