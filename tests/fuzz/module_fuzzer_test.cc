// The module fuzzer with bytes of a seeded generator. ATTND_TEST_LAYOUTS says how many layouts; the
// figure is of 1000000.
#include "tests/fuzz/module_fuzzer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "attention/random_problem.h"

namespace attnd {
namespace {

TEST(ModuleFuzzer, RefusesLayoutsWithinMillisecondsOrRunsThem) {
  const char* count = std::getenv("ATTND_TEST_LAYOUTS");
  const uint64_t layouts = count == nullptr ? 3000 : std::strtoull(count, nullptr, 10);
  std::vector<double> seconds;
  int64_t most_bytes = 0;
  uint64_t run = 0;
  for (uint64_t seed = 0; seed < layouts; ++seed) {
    Random random(seed);
    std::vector<uint8_t> bytes(static_cast<size_t>(random.Between(0, 2000)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Bits());
    SCOPED_TRACE(seed);
    const FuzzedModule fuzzed = FuzzModule(bytes.data(), bytes.size());
    run += fuzzed.was_run;
    seconds.push_back(fuzzed.check_seconds);
    most_bytes = std::max(most_bytes, fuzzed.check_bytes);
  }
  std::sort(seconds.begin(), seconds.end());
  // The last few in 10,000 are those in which the machine did something else.
  const double most = seconds[seconds.size() - 1 - seconds.size() / 2000];
  std::cout << layouts << " layouts, " << run << " run, checked within " << 1e3 * most
            << " ms, the slowest in " << 1e3 * seconds.back() << " ms, the largest in "
            << most_bytes << " bytes\n";
  EXPECT_LE(most_bytes, 1 << 20);
  EXPECT_GT(run, layouts / 10);
  EXPECT_LT(run, layouts);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(most, 5e-3);
#endif
}

}  // namespace
}  // namespace attnd
