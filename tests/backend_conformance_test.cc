// The reference engine passes its own table (its float64 results are rounded once), and the table
// notices deliberate mistakes: each mutation is an engine that is right but for one thing.
#include "tests/backend_conformance.h"

#include <gtest/gtest.h>

#include <set>

#include "kernels/reference_backend.h"

namespace attnd {
namespace {

const bool kRegistered = RegisterBackendConformance(
    "Reference", [] { return std::make_unique<ReferenceBackend>(); }, {});

TEST(ConformanceCases, HaveNamesOfTheirOwnAndValidProblems) {
  std::vector<ConformanceCase> cases = NamedConformanceCases();
  std::set<std::string> names;
  for (const ConformanceCase& c : cases) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_TRUE(Validate(c.problem).ok()) << c.name << ": " << Validate(c.problem);
  }
}

}  // namespace
}  // namespace attnd
