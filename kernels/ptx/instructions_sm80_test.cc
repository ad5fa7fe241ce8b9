// sm_80's fragments, run as a kernel would run them, and copies that race.
#include "kernels/ptx/instructions_sm80.h"

#include <random>
#include <string>

#include "gtest/gtest.h"

namespace attnd {
namespace {

using emulator::Launch;
using emulator::Place;

struct Halves {
  static uint16_t Bits(float x) { return Float16FromFloat(x); }
  static uint32_t Pack(float low, float high) { return ptx::PackHalves(low, high); }
  static void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::MmaHalf(c, a, b0, b1);
  }
};
struct BFloats {
  static uint16_t Bits(float x) { return BFloat16FromFloat(x); }
  static uint32_t Pack(float low, float high) { return ptx::PackBFloat16(low, high); }
  static void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::MmaBFloat16(c, a, b0, b1);
  }
};

template <class Element>
class Fragments : public testing::Test {};
using Elements = testing::Types<Halves, BFloats>;
TYPED_TEST_SUITE(Fragments, Elements);

// S = Q·Kᵀ of 16 rows and 16 keys, 16 numbers each; S as an operand; O = S·V with V transposed on
// its way in. What the kernels do, on small integers.
TYPED_TEST(Fragments, ScoresFeedTheNextProduct) {
  std::mt19937 random(3);
  std::uniform_int_distribution<int> digit(-2, 2);
  float q[16][16], k[16][16], v[16][16], out[16][16] = {};
  uint16_t halves[3][16][16];
  for (int i = 0; i < 16; ++i) {
    for (int d = 0; d < 16; ++d) {
      halves[0][i][d] = TypeParam::Bits(q[i][d] = static_cast<float>(digit(random)));
      halves[1][i][d] = TypeParam::Bits(k[i][d] = static_cast<float>(digit(random)));
      halves[2][i][d] = TypeParam::Bits(v[i][d] = static_cast<float>(digit(random)));
    }
  }
  auto report = Launch({.threads = 32, .shared_bytes = sizeof(halves)}, [&](const Place& at) {
    const int lane = at.thread;
    for (int n = 0; n < 3; ++n) {
      std::byte* to = at.shared + n * 512 + lane * 16;
      ptx::CopyAsync(to, &halves[n][lane / 2][lane % 2 * 8], true);
    }
    ptx::CommitCopies();
    ptx::WaitForCopies<0>();
    ptx::SyncWarp();
    auto row = [&](int n, int r, int chunk) { return at.shared + n * 512 + r * 32 + chunk * 16; };
    const uint4 rQ = ptx::LoadMatrices(row(0, lane % 16, lane / 16));
    const uint4 rK = ptx::LoadMatrices(row(1, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    const uint4 rV = ptx::LoadMatricesTransposed(row(2, lane % 16, lane / 16));
    float s[2][4] = {}, o[2][4] = {};
    TypeParam::Mma(s[0], {rQ.x, rQ.y, rQ.z, rQ.w}, rK.x, rK.y);
    TypeParam::Mma(s[1], {rQ.x, rQ.y, rQ.z, rQ.w}, rK.z, rK.w);
    const uint32_t p[4] = {TypeParam::Pack(s[0][0], s[0][1]), TypeParam::Pack(s[0][2], s[0][3]),
                           TypeParam::Pack(s[1][0], s[1][1]), TypeParam::Pack(s[1][2], s[1][3])};
    TypeParam::Mma(o[0], p, rV.x, rV.y);
    TypeParam::Mma(o[1], p, rV.z, rV.w);
    for (int n = 0; n < 8; ++n) {
      out[lane / 4 + n % 4 / 2 * 8][n / 4 * 8 + lane % 4 * 2 + n % 2] = o[n / 4][n % 4];
    }
  });
  ASSERT_TRUE(report.ok()) << report.status();
  for (int i = 0; i < 16; ++i) {
    for (int d = 0; d < 16; ++d) {
      float want = 0;
      for (int j = 0; j < 16; ++j) {
        float score = 0;
        for (int n = 0; n < 16; ++n) score += q[i][n] * k[j][n];
        want += score * v[j][d];
      }
      EXPECT_EQ(out[i][d], want) << i << " " << d;
    }
  }
}

// 64 threads: one of the first warp copies 16 bytes, one of the second reads them. What is wrong.
std::string Copying(bool waits, bool meets, bool reads_first) {
  const uint32_t source[4] = {1, 2, 3, 4};
  uint32_t read = 0;
  auto report = Launch({.threads = 64, .shared_bytes = 16, .shared = {.detect_races = true}},
                       [&](const Place& at) {
                         if (at.thread == 0) ptx::StoreShared128(at.shared, {9, 9, 9, 9});
                         ptx::SyncThreads();
                         if (reads_first && at.thread == 32) read = ptx::LoadShared32(at.shared);
                         if (at.thread == 0) {
                           ptx::CopyAsync(at.shared, source, true);
                           ptx::CommitCopies();
                           if (waits) ptx::WaitForCopies<0>();
                         }
                         if (meets) ptx::SyncThreads();
                         if (!reads_first && at.thread == 32) read = ptx::LoadShared32(at.shared);
                         ptx::SyncThreads();
                         if (at.thread == 0) ptx::WaitForCopies<0>();
                       });
  if (report.ok()) {
    EXPECT_EQ(read, 1u);
  }
  return std::string(report.status().message());
}
TEST(Copies, AreThereAfterTheWaitAndABarrier) { EXPECT_EQ(Copying(true, true, false), ""); }
TEST(Copies, RaceWithReadersBefore) {
  EXPECT_NE(Copying(true, true, true).find("race"), std::string::npos);
}
TEST(Copies, RaceWithReadersWhoDoNotMeet) {
  EXPECT_NE(Copying(true, false, false).find("race"), std::string::npos);
}
TEST(Copies, MustNotBeReadBeforeTheWait) {
  EXPECT_NE(Copying(false, true, false).find("under way"), std::string::npos);
}

TEST(Copies, WaitForAllButTheLastGroups) {
  const uint32_t source[4] = {1, 2, 3, 4};
  auto report = Launch({.threads = 32, .shared_bytes = 48}, [&](const Place& at) {
    if (at.thread != 0) return;
    for (int n = 0; n < 3; ++n) {
      ptx::CopyAsync(at.shared + n * 16, source, n != 2);
      ptx::CommitCopies();
    }
    ptx::WaitForCopies<2>();
    EXPECT_EQ(ptx::LoadShared32(at.shared), 1u);
    ptx::WaitForCopies<0>();
    EXPECT_EQ(ptx::LoadShared32(at.shared + 16), 1u);
    EXPECT_EQ(ptx::LoadShared32(at.shared + 32), 0u);
  });
  ASSERT_TRUE(report.ok()) << report.status();
}

}  // namespace
}  // namespace attnd
