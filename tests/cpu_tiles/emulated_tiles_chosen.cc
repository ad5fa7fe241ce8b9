// Linked into a test, lets the whole CPU engine multiply on emulated tiles.
#include <gtest/gtest.h>

#include "tests/cpu_tiles/emulated_tiles.h"

namespace attnd {
namespace {

const bool kChosen = [] {
  ChooseMatrixTiles(EmulatedTiles());
  return EmulatedTiles() != nullptr;
}();

TEST(EmulatedTiles, AreMultipliedBy) {
  if (!kChosen) GTEST_SKIP() << "the emulation needs AVX-512: the tests here ran without tiles";
}

}  // namespace
}  // namespace attnd
