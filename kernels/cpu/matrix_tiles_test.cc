// Products of tiles against float64 and, where the processor has tiles, the emulation's bits
// against its own; and numbers that tiles cannot hold, through the whole engine.
#include "kernels/cpu/matrix_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attention/element.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/cpu_tiles/emulated_tiles.h"

namespace attnd {
namespace {

constexpr int kDepthBlocks = 3;

float Widened(uint16_t number) { return FloatOf(uint32_t{number} << 16); }

// Two packed operands and C, of random numbers.
struct Operands {
  Operands(int a_terms, int b_terms, int row_tiles, int column_tiles, uint64_t seed)
      : a(row_tiles * kDepthBlocks * a_terms * kTileWords),
        b(column_tiles * kDepthBlocks * b_terms * kTileWords),
        c(row_tiles * kTileSide * column_tiles * kTileSide) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (std::vector<uint16_t>* words : {&a, &b}) {
      for (uint16_t& word : *words) word = static_cast<uint16_t>(BitsOf(normal(random)) >> 16);
    }
    for (float& number : c) number = normal(random);
    product = {.a = a.data(),
               .b = b.data(),
               .a_block = kDepthBlocks * a_terms,
               .b_block = kDepthBlocks * b_terms,
               .a_terms = a_terms,
               .b_terms = b_terms,
               .c = c.data(),
               .c_row = column_tiles * kTileSide,
               .row_tiles = row_tiles,
               .column_tiles = column_tiles,
               .k_begin = 1,
               .k_end = kDepthBlocks,
               .accumulate = true};
  }

  // The sum of terms of A(m, k) or B(k, n), whichever `words` is.
  static double Number(const std::vector<uint16_t>& words, int terms, int outer, int k, bool is_a) {
    const int64_t tile = (outer / kTileSide * kDepthBlocks + k / kTileDepth) * terms;
    const int pair = k % kTileSide, half = k % kTileDepth / kTileSide, side = outer % kTileSide;
    const int place = (is_a ? side * kTileSide + pair : pair * kTileSide + side) * 2 + half;
    double sum = 0;
    for (int t = 0; t < terms; ++t) sum += Widened(words[(tile + t) * kTileWords + place]);
    return sum;
  }

  std::vector<double> Exact() const {
    std::vector<double> exact(c.begin(), c.end());
    for (int m = 0; m < product.row_tiles * kTileSide; ++m) {
      for (int n = 0; n < product.column_tiles * kTileSide; ++n) {
        for (int k = product.k_begin * kTileDepth; k < product.k_end * kTileDepth; ++k) {
          exact[m * product.c_row + n] +=
              Number(a, product.a_terms, m, k, true) * Number(b, product.b_terms, n, k, false);
        }
      }
    }
    return exact;
  }

  void Multiply(const TileUnit& unit) {
    const TileSession session(unit);
    unit.multiply(product);
  }

  std::vector<uint16_t> a, b;
  std::vector<float> c;
  TileProduct product;
};

// Calls body(operands) for all terms and for whole and half blocks.
template <class Body>
void ForEachShape(const Body& body) {
  for (int a_terms : {1, 2}) {
    for (int b_terms : {1, 2}) {
      for (int row_tiles : {1, 2, 3}) {
        for (int column_tiles : {1, 4}) {
          body(Operands(a_terms, b_terms, row_tiles, column_tiles, a_terms + 10 * row_tiles));
        }
      }
    }
  }
}

TEST(EmulatedTiles, MultiplyLikeFloat64) {
  const TileUnit* unit = EmulatedTiles();
  if (unit == nullptr) GTEST_SKIP() << "the emulation needs AVX-512";
  ForEachShape([&](Operands operands) {
    const std::vector<double> exact = operands.Exact();
    operands.Multiply(*unit);
    for (size_t n = 0; n < exact.size(); ++n) ASSERT_NEAR(operands.c[n], exact[n], 3e-5);
  });
}

TEST(EmulatedTiles, LeaveColumnsBeyondTheLimitsAsTheyAre) {
  const TileUnit* unit = EmulatedTiles();
  if (unit == nullptr) GTEST_SKIP() << "the emulation needs AVX-512";
  Operands operands(1, 1, 2, 4, 1);
  const Span limit = {2, 3};
  operands.product.column_limits = &limit;
  operands.product.accumulate = false;
  const std::vector<float> before = operands.c;
  operands.Multiply(*unit);
  for (size_t n = 0; n < before.size(); ++n) {
    EXPECT_EQ(operands.c[n] == before[n], n % operands.product.c_row < kBlockSide);
  }
}

TEST(MatrixTiles, GiveTheEmulationsBits) {
  if (MatrixTiles() == nullptr) GTEST_SKIP() << "this processor has no tiles";
  ForEachShape([&](Operands operands) {
    Operands emulated = operands;
    emulated.product.a = emulated.a.data(), emulated.product.b = emulated.b.data();
    emulated.product.c = emulated.c.data();
    operands.Multiply(*MatrixTiles());
    emulated.Multiply(*EmulatedTiles());
    EXPECT_EQ(0, std::memcmp(operands.c.data(), emulated.c.data(), operands.c.size() * 4));
  });
}

// O of a bfloat16 problem whose values are multiplied by `scale`.
std::vector<uint16_t> OutputOfScaledValues(const TileUnit* unit, float scale) {
  Problem p = PlainProblem(1, 1, 70, 16);
  p.element = ElementType::kBFloat16;
  ProblemInputs inputs = RandomInputs(p, 1);
  uint16_t* values = inputs.v.as<uint16_t>();
  for (int64_t n = 0; n < p.ValueElements(); ++n) {
    values[n] = static_cast<uint16_t>(BitsOf(Widened(values[n]) * scale) >> 16);
  }
  std::vector<uint16_t> o(p.OutputElements());
  std::vector<float> lse(p.LseElements());
  ForwardCall call;
  call.problem = &p;
  call.q = inputs.q.data(), call.k = inputs.k.data(), call.v = inputs.v.data();
  call.o = o.data(), call.lse = lse.data();
  const TileUnit* own = MatrixTiles();
  ChooseMatrixTiles(unit);
  EXPECT_TRUE(MakeCpuBackend({.threads = 1})->Forward({&call, 1}).ok());
  ChooseMatrixTiles(own);
  return o;
}

// Products with probabilities fall below 2^-126, which tiles take for zero.
TEST(EmulatedTiles, KeepTinyValues) {
  const TileUnit* unit = EmulatedTiles();
  if (unit == nullptr) GTEST_SKIP() << "the emulation needs AVX-512";
  const std::vector<uint16_t> expected = OutputOfScaledValues(nullptr, 0x1p-122f);
  const std::vector<uint16_t> got = OutputOfScaledValues(unit, 0x1p-122f);
  for (size_t n = 0; n < expected.size(); ++n) {
    EXPECT_NEAR(Widened(got[n]) * 0x1p100, Widened(expected[n]) * 0x1p100, 0x1p-33) << n;
  }
}

}  // namespace
}  // namespace attnd
