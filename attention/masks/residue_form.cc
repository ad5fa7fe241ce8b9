#include "attention/masks/residue_form.h"

namespace attnd {
namespace {

// Adds what one part of the mask asks for. False: it is no part of a residue form.
bool Add(const MaskExpr& part, ResidueForm& form) {
  ResidueForm more;
  if (auto* stride = std::get_if<StrideRel>(&part.op)) {
    more = {.p = stride->p, .phase = stride->phase};
  } else if (auto* dilated = std::get_if<Dilated>(&part.op)) {
    const int64_t step = dilated->step;
    more = {.p = step,
            .left = dilated->left < 0 ? -1 : dilated->left * step,
            .right = dilated->right < 0 ? -1 : dilated->right * step};
  } else if (auto* window = std::get_if<RelativeWindow>(&part.op)) {
    more = {.left = window->left, .right = window->right};
  } else {
    return false;
  }
  if (more.p != 0) {
    if (form.p != 0 && (form.p != more.p || form.phase != more.phase)) return false;
    form.p = more.p;
    form.phase = more.phase;
  }
  form.left = TighterBound(form.left, more.left);
  form.right = TighterBound(form.right, more.right);
  return true;
}

}  // namespace

std::optional<ResidueForm> ResidueFormOf(const MaskSpec& canonical) {
  if (canonical.pattern_of.size() != 1) return std::nullopt;
  auto* expr = std::get_if<MaskExpr>(&canonical.pattern[canonical.pattern_of[0]]);
  if (expr == nullptr) return std::nullopt;
  ResidueForm form;
  if (std::holds_alternative<AllOf>(expr->op)) {
    for (const MaskExpr& part : expr->of) {
      if (!Add(part, form)) return std::nullopt;
    }
  } else if (!Add(*expr, form)) {
    return std::nullopt;
  }
  return form.p > 1 ? std::optional(form) : std::nullopt;
}

}  // namespace attnd
