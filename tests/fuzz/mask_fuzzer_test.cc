// The mask fuzzer with bytes of a seeded generator, without libFuzzer.
#include <gtest/gtest.h>

#include <vector>

#include "attention/random_problem.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace attnd {
namespace {

TEST(MaskFuzzer, FindsNoMaskThatIsSeenInTwoWays) {
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    Random random(seed);
    std::vector<uint8_t> bytes(static_cast<size_t>(random.Between(0, 2000)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Bits());
    SCOPED_TRACE(seed);
    ASSERT_EQ(LLVMFuzzerTestOneInput(bytes.data(), bytes.size()), 0);
  }
}

}  // namespace
}  // namespace attnd
