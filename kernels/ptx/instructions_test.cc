// The host bodies of instructions against the PTX ISA's words, run as a kernel would run them.
#include "kernels/ptx/instructions.h"

#include <cmath>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd {
namespace {

using emulator::Contents;
using emulator::GlobalMemory;
using emulator::Launch;
using emulator::Place;
using ::testing::HasSubstr;

TEST(Conversion, TruncatesTowardsZero) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-26, 17);
  for (int i = 0; i < 20000; ++i) {
    float value = std::exp2(exponent(random)) * (i % 2 ? 1 : -1);
    float got = ptx::LowHalf(ptx::PackTruncated(value, 0));
    EXPECT_LE(std::fabs(got), std::fabs(value)) << value;
    // The next half away from zero would be beyond the value.
    uint16_t next = static_cast<uint16_t>(Float16FromFloat(got) + 1);
    if (std::fabs(value) < 65504) {
      EXPECT_GT(std::fabs(FloatFromFloat16(next)), std::fabs(value));
    }
  }
  EXPECT_EQ(ptx::PackTruncated(1e6f, -1e6f), 0xfbff7bffu);
  EXPECT_EQ(ptx::PackTruncated(HUGE_VALF, 1), 0x3c007c00u);
  EXPECT_TRUE(std::isnan(ptx::HighHalf(ptx::PackTruncated(0, NAN))));
  EXPECT_EQ(ptx::PackRounded(1e6f, 1), 0x3c007c00u);
}

TEST(Permute, PicksBytesAndReplicatesSigns) {
  EXPECT_EQ(ptx::Permute(0x33221100u, 0x77665544u, 0x7531), 0x77553311u);
  EXPECT_EQ(ptx::Permute(0x80u, 0x7fu, 0x4c08), 0x7f0080ffu);
}

TEST(Arithmetic, FollowsTheInstructionsOnSpecialValues) {
  EXPECT_EQ(ptx::Exp2(-HUGE_VALF), 0);
  EXPECT_EQ(ptx::Exp2(-127), 0);  // flushed
  EXPECT_EQ(ptx::Exp2(3), 8);
  EXPECT_EQ(ptx::Max(NAN, 2), 2);
  EXPECT_EQ(ptx::Log2(0), -HUGE_VALF);
}

TEST(Lanes, VotesOverTheWarp) {
  auto report = Launch({.threads = 64}, [](const Place& at) {
    EXPECT_EQ(ptx::VoteAny(at.thread == 40), at.thread >= 32);
    EXPECT_EQ(ptx::ShuffleXor(1.5f * at.thread, 16), 1.5f * (at.thread ^ 16));
    ptx::SyncWarp();
  });
  EXPECT_TRUE(report.ok()) << report.status();
}

TEST(Memory, MovesWideWordsAndChecksThem) {
  alignas(16) uint32_t in[128], out[128];
  for (int i = 0; i < 128; ++i) in[i] = i * 3;
  GlobalMemory memory;
  memory.Register(in, sizeof(in), Contents::kConstant, "in");
  memory.Register(out, sizeof(out), Contents::kUninitialised, "out");
  emulator::LaunchOptions options{.threads = 32, .shared_bytes = 512, .memory = &memory};
  options.shared = {.count_conflicts = true, .detect_races = true};
  auto kernel = [&](const Place& at) {
    ptx::StoreShared128(at.shared + 16 * at.thread, ptx::LoadConstant128(in + 4 * at.thread));
    ptx::SyncThreads();
    ptx::StoreGlobal128(out + 4 * at.thread, ptx::LoadShared128(at.shared + 16 * (at.thread ^ 1)));
  };
  auto report = Launch(options, kernel);
  ASSERT_TRUE(report.ok()) << report.status();
  for (int i = 0; i < 128; ++i) EXPECT_EQ(out[i], in[i ^ 4]);
  EXPECT_EQ(memory.UnwrittenBytes(out), 0);
  for (const emulator::BankReport& bank : report->banks) EXPECT_EQ(bank.conflicts, 0);

  auto beyond =
      Launch(options, [&](const Place& at) { ptx::StoreGlobal32(out + 4 * at.thread + 4, 0); });
  EXPECT_THAT(std::string(beyond.status().message()),
              HasSubstr("thread 31 at instructions_test.cc:"));
}

TEST(Memory, AddsInTurnWhenBlocksPassAFlag) {
  float sum = 1;
  int32_t turn = 0;
  auto report = Launch({.grid = {5, 1, 1}, .threads = 32}, [&](const Place& at) {
    if (at.thread == 0) {
      while (ptx::LoadAcquire(&turn) != static_cast<int>(at.block.x)) {
      }
      ptx::ReduceAdd(&sum, 0.5f);
      ptx::StoreRelease(&turn, static_cast<int>(at.block.x) + 1);
    }
  });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(sum, 3.5f);
}

}  // namespace
}  // namespace attnd
