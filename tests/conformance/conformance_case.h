// ConformanceCase: one problem of the table that every engine is run over, and CallMemory, where an
// engine takes its tensors from.
#pragma once

#include <cstdint>
#include <string>

#include "attention/problem.h"
#include "attention/random_problem.h"

namespace attnd {

// CallMemory: where a backend's calls find their tensors. The default is the host's heap; an engine
// whose memory the host cannot address brings its own. One thread.
class CallMemory {
 public:
  virtual ~CallMemory() = default;
  virtual void* Allocate(int64_t bytes) = 0;  // 64-byte aligned; lives until Clear
  virtual void Write(void* to, const void* from, int64_t bytes) = 0;
  virtual void Read(void* to, const void* from, int64_t bytes) = 0;
  virtual void Clear() = 0;
};
std::unique_ptr<CallMemory> MakeHostCallMemory();  // the host's heap: conformance_launch.cc

// Which input has something else than a random number at one place.
enum class Poison { kNone, kQuery, kKey, kValue, kOutputGradient, kBias, kLseGradient };

struct ConformanceCase {
  std::string name;  // unique; letters, digits and underscores
  Problem problem;
  Values values = Values::kNormal;
  Poison poison = Poison::kNone;
  float poison_value = 0;
  bool poisons_row = false;  // the whole row of head_dim numbers, not one of them
  int poison_eighths = 7;    // how far back in the tensor
  bool brief = false;        // numbers, and NaN in unseen keys: one launch each way
};

}  // namespace attnd
