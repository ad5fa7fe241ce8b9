// The attention problem of one op in one call: the op's heads and options, the call's sequences,
// dropout at the op's site. Pure functions; any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "modules/call_rows.h"
#include "modules/graph.h"

namespace attnd {

// Where a module's dropout stands in the generator's space: each op of each layer has its own site,
// which is the upper half of the generator's offset. 0 is left to attention calls.
constexpr uint32_t DropoutSite(int64_t layer, int64_t op) {
  return static_cast<uint32_t>(1 + 256 * layer + op);
}
constexpr uint64_t SiteOffset(uint32_t site, uint32_t call_offset) {
  return uint64_t{site} << 32 | call_offset;
}

// Op `op` of `layer` is attention. Tensors are [rows, heads, dim], sequences end to end. The mask
// by description, if the op has one, is made for these rows. Errors: what Validate and
// MaskDescription say of rows that do not fit; none once CheckRows has passed.
absl::StatusOr<Problem> ProblemOf(const ModuleGraph& graph, int64_t layer, int64_t op,
                                  const CallRows& rows, const CallDropout& dropout);

}  // namespace attnd
