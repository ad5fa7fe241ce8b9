// ProblemFlags: a Problem's options as command-line flags, shared by bench and run.
#pragma once

#include <map>
#include <string>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/problem.h"

namespace attnd {

class ProblemFlags {
 public:
  void AddTo(CLI::App& command);

  // What a file says about its own problem ("causal": "bottom_right", ...), by the flags' names
  // without dashes. A flag on the command line wins. INVALID_ARGUMENT for a value or a name that
  // does not exist.
  absl::Status Merge(const std::map<std::string, std::string>& metadata);

  // Sets layout, scale, masks, dropout and the like. The caller sets sizes, and may set offsets of
  // the diagonal, which no flag may then contradict. INVALID_ARGUMENT naming the flag.
  absl::Status Apply(Problem& problem) const;

 private:
  // By name; only what has been given.
  std::map<std::string, std::string> values_;
};

// "float16", "bfloat16", "float32" (also f16, bf16, f32).
absl::StatusOr<ElementType> ParseElement(const std::string& name);

}  // namespace attnd
