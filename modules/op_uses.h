// Lists what an op reads: values and parameters, by number, in the order of its fields; and its
// name on the wire. Liveness, checks and executors ask here instead of listing ops themselves. Pure
// functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "modules/layout.h"

namespace attnd {

struct ValueUse {
  absl::string_view field;  // "input", "q.value"
  int64_t value;
};
std::vector<ValueUse> ValuesOf(const ModuleOp& op);

struct ParameterUse {
  absl::string_view field;  // "weight"
  int64_t parameter;
};
std::vector<ParameterUse> ParametersOf(const ModuleOp& op);

absl::string_view OpName(const ModuleOp& op);  // "linear"; "" where nothing is set

}  // namespace attnd
