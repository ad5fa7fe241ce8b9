// Replays the fuzzer's seed corpus (tests/fuzz/decode_corpus) and what grows from each seed by
// cutting and flipping, without libFuzzer.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "attention/random_problem.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace attnd {
namespace {

void Replay(const std::string& input) {
  EXPECT_EQ(LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size()),
            0);
}

TEST(DecodeCorpus, GivesAStatusForEverySeedAndItsMutations) {
  int seeds = 0;
  Random random(3);
  for (const auto& file : std::filesystem::directory_iterator("tests/fuzz/decode_corpus")) {
    std::ifstream in(file.path(), std::ios::binary);
    std::string seed((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    SCOPED_TRACE(file.path().string());
    Replay(seed);
    for (int n = 0; n < 200 && !seed.empty(); ++n) {
      std::string mutated = seed;
      for (int64_t flips = random.Between(1, 4); flips > 0; --flips) {
        mutated[static_cast<size_t>(random.Between(0, static_cast<int64_t>(seed.size()) - 1))] =
            static_cast<char>(random.Bits());
      }
      if (random.Chance(0.3)) {
        mutated.resize(static_cast<size_t>(random.Between(1, static_cast<int64_t>(seed.size()))));
      }
      Replay(mutated);
    }
    ++seeds;
  }
  EXPECT_GE(seeds, 60);
}

}  // namespace
}  // namespace attnd
