// A Problem as command-line flags: ProblemFlags its options, shared by bench, mask and run;
// SizeFlags its sizes and elements, where no file says them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"

namespace attnd {

class ProblemFlags {
 public:
  void AddTo(CLI::App& command);

  // Takes a file's options of its own problem ("causal": "bottom_right", ...), by the flags' names
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

class SizeFlags {
 public:
  void AddTo(CLI::App& command);
  // A valid problem of these sizes and options; packed layouts hold the batch's entries end to end.
  // INVALID_ARGUMENT naming the flag.
  absl::StatusOr<Problem> MakeProblem(const ProblemFlags& options) const;
  bool has_dtype() const { return !dtype_.empty(); }  // else float32

 private:
  std::string shape_ = "1,8,1024,64";
  int64_t kv_heads_ = 0, kv_len_ = 0, v_head_dim_ = 0;
  std::string dtype_;
};

// Gives the problem the mask that `text` spells (client/masks/mask_text.h), and its mask_share.
// Errors name `flag`.
absl::Status ApplyMask(absl::string_view flag, const std::string& text, Problem& problem);

// Numbers above 0 between separators.
absl::StatusOr<std::vector<int64_t>> ParseNumbers(absl::string_view flag, const std::string& text,
                                                  char separator);

// "float16", "bfloat16", "float32" (also f16, bf16, f32).
absl::StatusOr<ElementType> ParseElement(const std::string& name);

}  // namespace attnd
