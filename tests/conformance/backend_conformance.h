// Backend conformance: one table of cases, every engine, against attention/reference.h. An engine's
// test file says one thing:
//
//     const bool registered = attnd::RegisterBackendConformance(
//         "Cpu", [] { return attnd::MakeCpuBackend(...); }, {});
//
// which adds a GoogleTest for each named case and each random problem. A case checks, forward and
// backward: every element within the bound of attention/error_bounds.h; nothing unwritten (outputs
// and workspace start as NaN) and nothing written past an end; the same bits on repeat, beside
// other calls in a launch, and cut into shards by batch entry and key head; backward with another o
// and lse than its own, which it must use; and NaN in keys and values that no row sees, which must
// change no bit; and backward on what a kept forward left on the device. A case is left out only
// where Supports answers UNIMPLEMENTED, which is counted against `max_unsupported`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/error_bounds.h"
#include "attention/random_problem.h"
#include "kernels/backend.h"
#include "tests/conformance/conformance_case.h"

namespace attnd {

struct ConformanceOptions {
  int64_t max_pairs =
      INT64_MAX;             // cases with more (row, key) pairs over all heads are not registered
  int random_problems = 60;  // beside the named cases
  int64_t random_max_pairs = 6000;
  uint64_t random_seed = 1;
  // Every case in this element type, for an engine that has one natively; cases that differ in
  // nothing else stand once. Absent: the elements that the table names.
  std::optional<ElementType> element;
  EnginePrecision precision;
  int mask_stride = 1;      // of the cases of masks by description every n-th
  int whole_stride = 1;     // of all cases every n-th in whole, the rest are brief
  int max_unsupported = 0;  // (case, direction) pairs that Supports may refuse
  // NaN in a key or value that some rows see must not reach rows that do not see it, even inside
  // one tile. An engine that multiplies whole tiles and accepts that leak says so here and in its
  // docs.
  bool isolates_rows_in_tiles = true;
  // Numbers of a head are kept relative to the largest that some row sees, so that one which only
  // later rows see costs the others (docs/NUMERICS.md).
  bool shares_range = false;
  std::function<std::unique_ptr<CallMemory>()> memory = MakeHostCallMemory;
};

// The named cases, the same for every engine, and the random ones.
std::vector<ConformanceCase> NamedConformanceCases();
std::vector<ConformanceCase> RandomConformanceCases(const ConformanceOptions& options);

struct CaseReport {
  std::vector<std::string>
      failures;         // empty: the engine conforms; each names tensor, place, values
  int unsupported = 0;  // directions that Supports refused
  double worst_forward = 0, worst_backward = 0;  // largest error / bound met
};
CaseReport CheckCase(Backend& backend, const ConformanceCase& test_case,
                     const ConformanceOptions& options);

// Adds the tests "<name>Conformance.<case>". One backend serves them all; it is made at the first.
bool RegisterBackendConformance(const std::string& name,
                                std::function<std::unique_ptr<Backend>()> make_backend,
                                const ConformanceOptions& options);

}  // namespace attnd
