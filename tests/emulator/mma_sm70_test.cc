// The lane maps of mma.m8n8k4, proved by enumeration, and the product's rounding.
#include "tests/emulator/mma_sm70.h"

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "attention/element.h"
#include "gtest/gtest.h"

namespace attnd::emulator {
namespace {

// The formulas as the PTX ISA prints them, %laneid by %laneid.
FragmentPlace PtxA(Major major, int laneid, int i) {
  if (major == Major::kRow) return {laneid < 16 ? laneid % 4 : laneid % 4 + 4, i};
  return {laneid < 16 ? i % 4 : i % 4 + 4, laneid % 4};
}
FragmentPlace PtxB(Major major, int laneid, int i) {
  if (major == Major::kRow) return {laneid % 4, laneid < 16 ? i : i + 4};
  return {i, laneid < 16 ? laneid % 4 : laneid % 4 + 4};
}
FragmentPlace PtxC16(int laneid, int i) { return {laneid < 16 ? laneid % 4 : laneid % 4 + 4, i}; }
FragmentPlace PtxC32(int laneid, int i) {
  int x = (laneid & 0b1) + (i & 0b10);
  return {laneid < 16 ? x : x + 4, (i & 0b100) + (laneid & 0b10) + (i & 0b1)};
}

bool Same(FragmentPlace a, FragmentPlace b) { return a.row == b.row && a.column == b.column; }

TEST(LaneMap, EqualsThePtxFormulasForEveryLaneAndElement) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      EXPECT_TRUE(Same(PlaceInC16(lane, e), PtxC16(lane, e))) << lane << " " << e;
      EXPECT_TRUE(Same(PlaceInC32(lane, e), PtxC32(lane, e))) << lane << " " << e;
      for (Major major : {Major::kRow, Major::kColumn}) {
        if (e >= 4) continue;
        EXPECT_TRUE(Same(PlaceInA(major, lane, e), PtxA(major, lane, e))) << lane << " " << e;
        EXPECT_TRUE(Same(PlaceInB(major, lane, e), PtxB(major, lane, e))) << lane << " " << e;
      }
    }
  }
}

template <class Place>
void ExpectEachOnce(Place place, int elements, int rows, int columns) {
  std::set<std::tuple<int, int, int>> seen;
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < elements; ++e) {
      FragmentPlace at = place(lane, e);
      ASSERT_TRUE(at.row >= 0 && at.row < rows && at.column >= 0 && at.column < columns);
      EXPECT_TRUE(seen.emplace(QuadPair(lane), at.row, at.column).second) << lane << " " << e;
    }
  }
  EXPECT_EQ(seen.size(), 4u * rows * columns);
}

TEST(LaneMap, HitsEachPlaceOnce) {
  for (Major major : {Major::kRow, Major::kColumn}) {
    ExpectEachOnce([&](int lane, int e) { return PlaceInA(major, lane, e); }, 4, 8, 4);
    ExpectEachOnce([&](int lane, int e) { return PlaceInB(major, lane, e); }, 4, 4, 8);
  }
  ExpectEachOnce(PlaceInC16, 8, 8, 8);
  ExpectEachOnce(PlaceInC32, 8, 8, 8);
}

// An f32 accumulator becomes the next product's A operand (row) by one exchange with lane ^ 2: of a
// lane's two rows, x and x + 2, it keeps the row that is its own in A, and its partner has the
// other two columns of that row.
TEST(LaneMap, ExchangeWithLaneXorTwoTurnsAccumulatorIntoOperand) {
  for (int lane = 0; lane < 32; ++lane) {
    const int partner = lane ^ 2;
    EXPECT_EQ(QuadPair(lane), QuadPair(partner));
    for (int k_step = 0; k_step < 2; ++k_step) {  // columns 0-3, 4-7 of the 8×8 accumulator
      std::set<int> columns;
      int from_partner = 0;
      for (int source : {lane, partner}) {
        for (int e = 4 * k_step; e < 4 * k_step + 4; ++e) {
          FragmentPlace at = PlaceInC32(source, e);
          if (at.row != PlaceInA(Major::kRow, lane, 0).row) continue;
          EXPECT_EQ(at.column / 4, k_step);
          columns.insert(at.column % 4);
          from_partner += source == partner;
        }
      }
      EXPECT_EQ(columns, (std::set<int>{0, 1, 2, 3})) << lane;
      EXPECT_EQ(from_partner, 2) << lane;  // one register of two halves crosses
    }
  }
}

struct Warp {
  std::vector<Mma32> f32 = std::vector<Mma32>(32);
  std::vector<Mma16> f16 = std::vector<Mma16>(32);
  float d32[32][8] = {};
  uint32_t d16[32][4] = {};

  void Run(Major a, Major b) {
    Mma32* lanes32[32];
    Mma16* lanes16[32];
    for (int lane = 0; lane < 32; ++lane) {
      f32[lane].d = d32[lane];
      f16[lane].d = d16[lane];
      lanes32[lane] = &f32[lane];
      lanes16[lane] = &f16[lane];
    }
    MultiplyF32(a, b, lanes32);
    MultiplyF16(a, b, lanes16);
  }
  float Half(int lane, int e) const {
    return FloatFromFloat16(static_cast<uint16_t>(d16[lane][e / 2] >> (e % 2 * 16)));
  }
};

uint32_t Pack(float low, float high) {
  return Float16FromFloat(low) | uint32_t{Float16FromFloat(high)} << 16;
}

// Small integers: every order and rounding gives the same sum.
TEST(Mma, MultipliesIntegersExactlyInEveryLayout) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> digit(-9, 9);
  for (Major a_major : {Major::kRow, Major::kColumn}) {
    for (Major b_major : {Major::kRow, Major::kColumn}) {
      float a[4][8][4], b[4][4][8], c[4][8][8];
      for (float* p = &a[0][0][0]; p < &a[0][0][0] + 128; ++p) *p = digit(random);
      for (float* p = &b[0][0][0]; p < &b[0][0][0] + 128; ++p) *p = digit(random);
      for (float* p = &c[0][0][0]; p < &c[0][0][0] + 256; ++p) *p = digit(random);
      Warp warp;
      for (int lane = 0; lane < 32; ++lane) {
        int q = lane % 16 / 4;
        auto at_a = [&](int i) {
          auto p = PtxA(a_major, lane, i);
          return a[q][p.row][p.column];
        };
        auto at_b = [&](int i) {
          auto p = PtxB(b_major, lane, i);
          return b[q][p.row][p.column];
        };
        for (int r = 0; r < 2; ++r) {
          warp.f32[lane].a[r] = warp.f16[lane].a[r] = Pack(at_a(2 * r), at_a(2 * r + 1));
          warp.f32[lane].b[r] = warp.f16[lane].b[r] = Pack(at_b(2 * r), at_b(2 * r + 1));
        }
        for (int i = 0; i < 8; ++i) {
          auto p = PtxC32(lane, i);
          warp.d32[lane][i] = c[q][p.row][p.column];
        }
        for (int i = 0; i < 8; i += 2) {
          auto p = PtxC16(lane, i);
          warp.d16[lane][i / 2] = Pack(c[q][p.row][p.column], c[q][p.row][p.column + 1]);
        }
      }
      warp.Run(a_major, b_major);
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 8; ++i) {
          auto want = [&](FragmentPlace p) {
            int q = lane % 16 / 4;
            float sum = c[q][p.row][p.column];
            for (int k = 0; k < 4; ++k) sum += a[q][p.row][k] * b[q][k][p.column];
            return sum;
          };
          EXPECT_EQ(warp.d32[lane][i], want(PtxC32(lane, i))) << lane << " " << i;
          EXPECT_EQ(warp.Half(lane, i), want(PtxC16(lane, i))) << lane << " " << i;
        }
      }
    }
  }
}

TEST(Mma, TruncatesFloatSumsAndRoundsHalfSumsOnce) {
  // 1 + 2^-24 + 2^-24·2^-10…: nearest would give the next float, truncation gives 1.
  EXPECT_EQ(TruncateToFloat(1 + 0x1.8p-24), 1.0f);
  EXPECT_EQ(TruncateToFloat(-1 - 0x1.8p-24), -1.0f);
  EXPECT_EQ(TruncateToFloat(0x1p200), std::numeric_limits<float>::max());
  EXPECT_EQ(RoundToHalf(1 + 0x1p-11), Float16FromFloat(1));  // a tie goes to even
  EXPECT_EQ(RoundToHalf(1 + 0x1p-11 + 0x1p-40), Float16FromFloat(1 + 0x1p-10f));
  EXPECT_EQ(RoundToHalf(65520), 0x7c00);
  EXPECT_EQ(RoundToHalf(65519.999), 0x7bff);
}

TEST(Mma, KeepsInfinityAndNaN) {
  Warp warp;
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 2; ++r) {
      warp.f32[lane].a[r] = warp.f16[lane].a[r] = Pack(1, 1);
      warp.f32[lane].b[r] = warp.f16[lane].b[r] = Pack(1, 1);
    }
  }
  // Row 0 of quad-pair 0 holds infinity, row 1 NaN.
  warp.f32[0].a[0] = warp.f16[0].a[0] = 0x3c007c00;
  warp.f32[1].a[0] = warp.f16[1].a[0] = 0x3c007e00;
  warp.Run(Major::kRow, Major::kColumn);
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      bool first = QuadPair(lane) == 0;
      auto check = [&](float got, int row) {
        if (first && row == 0) {
          EXPECT_TRUE(std::isinf(got));
        } else if (first && row == 1) {
          EXPECT_TRUE(std::isnan(got));
        } else {
          EXPECT_EQ(got, 4);
        }
      };
      check(warp.d32[lane][e], PtxC32(lane, e).row);
      check(warp.Half(lane, e), PtxC16(lane, e).row);
    }
  }
}

}  // namespace
}  // namespace attnd::emulator
