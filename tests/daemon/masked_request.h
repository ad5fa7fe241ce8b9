// Requests with masks by description: whole, by id, and slow to compile.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "client/masks/mask_builder.h"
#include "client/masks/mask_text.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {

// `text`: as the command line spells masks.
inline Problem WithMask(Problem p, const std::string& text, EmptyRow empty_row = EmptyRow::kZero) {
  const auto mask = masks::ParseMask(text, p.kv_len);
  CHECK(mask.ok()) << mask.status();
  const absl::Status status = masks::SetMask(mask->Spec(empty_row), p);
  CHECK(status.ok()) << status;
  return p;
}

inline std::string IdOf(const Problem& p) {
  const MaskId& id = p.mask->id();
  return std::string(id.begin(), id.end());
}

// The same request with its mask's id in the mask's place.
template <class Request>
Request ByMaskId(Request request, const std::string& id) {
  v1::MaskSpec named;
  named.set_id(id);
  *request.mutable_problem()->mutable_mask() = named;
  return request;
}

// Mixed everywhere and of many nodes: some tenths of a second. Each `seed` has another.
inline Problem SlowMask(int64_t seed) {
  Problem p = SmallProblem(32768, 1);
  p.qk_head_dim = p.v_head_dim = 1;
  p.element = ElementType::kFloat16;
  std::string text = absl::StrCat("stride(1009,", seed, ")");
  for (int64_t n = 0; n < 100; ++n) absl::StrAppend(&text, " | stride(", 1013 + 2 * n, ",3)");
  return WithMask(p, text);
}

}  // namespace attnd
