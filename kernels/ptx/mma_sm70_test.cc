// The lane exchange that turns Volta's scores into an operand, run as a kernel would run it.
#include "kernels/ptx/mma_sm70.h"

#include <random>

#include "gtest/gtest.h"
#include "kernels/ptx/instructions.h"

namespace attnd {
namespace {

using emulator::Launch;
using emulator::Place;

// S = A·Bᵀ in f32 accumulators, rounded to f16, exchanged with lane ^ 2, then O = S·V: equals the
// product of the matrices. One quad-pair's view of what the kernels do; quad-pairs are independent.
TEST(Lanes, ExchangeOfScoresWithLaneXorTwoFeedsTheNextProduct) {
  std::mt19937 random(11);
  std::uniform_int_distribution<int> digit(-3, 3);
  float a[4][8][4], b[4][8][4], v[4][8][8];  // per quad-pair: Q rows × k, keys × k, keys × columns
  for (float* p = &a[0][0][0]; p < &a[0][0][0] + 128; ++p) *p = digit(random);
  for (float* p = &b[0][0][0]; p < &b[0][0][0] + 128; ++p) *p = digit(random);
  for (float* p = &v[0][0][0]; p < &v[0][0][0] + 256; ++p) *p = digit(random);
  float out[4][8][8] = {};
  auto report = Launch({.threads = 32}, [&](const Place& at) {
    const int lane = at.thread, q = lane % 16 / 4, row = lane % 4 + lane / 16 * 4, t = lane % 4;
    auto pack = [](float low, float high) { return ptx::PackRounded(low, high); };
    float s[8] = {};
    ptx::MmaRowCol(s, pack(a[q][row][0], a[q][row][1]), pack(a[q][row][2], a[q][row][3]),
                   pack(b[q][row][0], b[q][row][1]), pack(b[q][row][2], b[q][row][3]));
    float o[8] = {};
    for (int step = 0; step < 2; ++step) {
      // Rows x and x + 2 of this lane; it keeps the one that is its own as an operand.
      uint32_t first = ptx::PackTruncated(s[4 * step], s[4 * step + 1]);
      uint32_t second = ptx::PackTruncated(s[4 * step + 2], s[4 * step + 3]);
      bool high = lane & 2;
      uint32_t keep = high ? second : first;
      uint32_t other = ptx::ShuffleXor(high ? first : second, 2);
      uint32_t a0 = high ? other : keep, a1 = high ? keep : other;
      const float* keys = v[q][4 * step + t] + lane / 16 * 4;  // B, row: four columns of key t
      ptx::MmaRowRow(o, a0, a1, pack(keys[0], keys[1]), pack(keys[2], keys[3]));
    }
    for (int e = 0; e < 8; ++e) {
      out[q][(lane & 1) + (e & 2) + lane / 16 * 4][(e & 1) + (lane & 2) + (e & 4)] = o[e];
    }
  });
  ASSERT_TRUE(report.ok()) << report.status();
  for (int q = 0; q < 4; ++q) {
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < 8; ++j) {
        float want = 0;
        for (int key = 0; key < 8; ++key) {
          float score = 0;
          for (int k = 0; k < 4; ++k) score += a[q][i][k] * b[q][key][k];
          want += score * v[q][key][j];
        }
        EXPECT_EQ(out[q][i][j], want) << q << " " << i << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace attnd
