// The emulator's own rules, each shown by a small kernel that keeps it or breaks it.
#include "tests/emulator/block.h"

#include <bit>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd::emulator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

SourceLocation Here(SourceLocation here = SourceLocation::current()) { return here; }

// A shuffle, as the host body of one would be written.
struct Exchange {
  int value, result, partner;
};
void RunExchange(void* const* arguments, uint32_t mask) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* own = static_cast<Exchange*>(arguments[lane]);
    own->result = static_cast<Exchange*>(arguments[own->partner])->value;
  }
}
int ShuffleXor(int value, int bits, uint32_t mask = ~0u, SourceLocation where = Here()) {
  Exchange exchange{value, 0, CurrentLane() ^ bits};
  MeetInWarp(&RunExchange, &exchange, mask, where);
  return exchange.result;
}

template <class T>
T Load(const T* address, SourceLocation where = Here()) {
  CheckShared(address, sizeof(T), Access::kLoad, where);
  return *address;
}
template <class T>
void Store(T* address, T value, SourceLocation where = Here()) {
  CheckShared(address, sizeof(T), Access::kStore, where);
  *address = value;
}

std::string FailureOf(const LaunchOptions& options, const Kernel& kernel) {
  auto result = Launch(options, kernel);
  return result.ok() ? "" : std::string(result.status().message());
}

TEST(Block, ExchangesValuesBetweenLanesInEveryWarpOfEveryBlock) {
  std::vector<int> out(4 * 64);
  LaunchOptions options{.grid = {2, 2, 1}, .threads = 64};
  auto report = Launch(options, [&](const Place& at) {
    int sum = at.thread;
    for (int bits : {1, 2, 4, 8, 16}) sum += ShuffleXor(sum, bits);
    out[(at.block.y * 2 + at.block.x) * 64 + at.thread] = sum;
  });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->warp_operations, 4 * 2 * 5);
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(out[i], i % 64 < 32 ? 31 * 32 / 2 : 31 * 32 / 2 + 32 * 32) << i;
  }
}

TEST(Block, LetsHalfWarpsMeetByThemselves) {
  auto report = Launch({.threads = 32}, [&](const Place& at) {
    uint32_t mask = at.thread < 16 ? 0xffffu : 0xffff0000u;
    EXPECT_EQ(ShuffleXor(at.thread, 15, mask), at.thread ^ 15);
    if (at.thread < 16) {
      EXPECT_EQ(ShuffleXor(at.thread, 1, 0xffffu), at.thread ^ 1);
    }
  });
  EXPECT_TRUE(report.ok()) << report.status();
}

TEST(Block, HandsSharedMemoryOverAtBarriers) {
  LaunchOptions options{.threads = 256, .shared_bytes = 1024};
  options.shared.detect_races = true;
  auto report = Launch(options, [&](const Place& at) {
    int* values = reinterpret_cast<int*>(at.shared);
    for (int round = 0; round < 3; ++round) {
      Store(values + at.thread, at.thread + round);
      WaitAtBarrier(0, 0, Here());
      EXPECT_EQ(Load(values + (at.thread + 77) % 256), (at.thread + 77) % 256 + round);
      WaitAtBarrier(0, 0, Here());
    }
  });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->barriers, 6);
}

// Producer warps arrive at barriers 1 + slot and consumers wait there, so neither half stops more
// than it must.
TEST(Block, OpensNamedBarriersForProducersAndConsumers) {
  LaunchOptions options{.threads = 64, .shared_bytes = 256};
  options.shared.detect_races = true;
  auto report = Launch(options, [&](const Place& at) {
    int* values = reinterpret_cast<int*>(at.shared);
    int lane = at.thread % 32;
    for (int step = 0; step < 6; ++step) {
      int slot = step % 2;
      if (at.thread < 32) {
        if (step >= 2) WaitAtBarrier(3 + slot, 64, Here());
        Store(values + slot * 32 + lane, step * 100 + lane);
        ArriveAtBarrier(1 + slot, 64, Here());
      } else {
        WaitAtBarrier(1 + slot, 64, Here());
        EXPECT_EQ(Load(values + slot * 32 + (lane ^ 1)), step * 100 + (lane ^ 1));
        if (step < 4) ArriveAtBarrier(3 + slot, 64, Here());
      }
    }
  });
  EXPECT_TRUE(report.ok()) << report.status();
}

TEST(Block, CountsReturnedThreadsOutOfBlockBarriers) {
  auto report = Launch({.threads = 64}, [&](const Place& at) {
    if (at.thread >= 32) return;
    WaitAtBarrier(0, 0, Here());
  });
  EXPECT_TRUE(report.ok()) << report.status();
}

TEST(Block, NamesTheThreadsThatWaitInADeadlock) {
  std::string failure = FailureOf({.threads = 64}, [&](const Place& at) {
    if (at.thread < 32) WaitAtBarrier(1, 64, Here());
    if (at.thread >= 40) ShuffleXor(0, 1);
  });
  EXPECT_THAT(failure, AllOf(HasSubstr("deadlock"),
                             HasSubstr("threads 0-31 wait at barrier 1 (32 "
                                       "of 64 arrived, block_test.cc:"),
                             HasSubstr("threads 32-39 have returned"),
                             HasSubstr("threads 40-63 wait for lanes ffffffff of their warp")));
}

TEST(Block, FailsWhenLanesOfAWarpMeetAtDifferentPlaces) {
  std::string failure = FailureOf({.threads = 32}, [&](const Place& at) {
    if (at.thread < 5) {
      ShuffleXor(0, 1);
    } else {
      ShuffleXor(0, 2);
    }
  });
  EXPECT_THAT(failure, AllOf(HasSubstr("threads 0-4 wait for lanes"),
                             HasSubstr("threads 5-31 wait for lanes")));
}

TEST(Block, FailsWhenBarrierUsersDisagreeOnItsCount) {
  std::string failure = FailureOf({.threads = 96}, [&](const Place& at) {
    WaitAtBarrier(1, at.thread < 32 ? 64 : 96, Here());
  });
  EXPECT_THAT(failure, HasSubstr("awaited for 96 threads here and for 64"));
}

TEST(Block, RunsBlocksInOrderSoThatALaterOneMayPoll) {
  int flag = 0;
  std::vector<int> order;
  auto report = Launch({.grid = {3, 1, 1}, .threads = 32}, [&](const Place& at) {
    while (flag != static_cast<int>(at.block.x)) Poll(Here());
    SynchroniseWarp(~0u, Here());
    if (at.thread == 0) {
      order.push_back(static_cast<int>(at.block.x));
      ++flag;
    }
  });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

TEST(Block, LetsAnotherWarpWorkWhileOnePolls) {
  int flag = 0;
  auto report = Launch({.threads = 64}, [&](const Place& at) {
    if (at.thread < 32) {
      while (flag < 32) Poll(Here());
    } else {
      ++flag;
    }
  });
  EXPECT_TRUE(report.ok()) << report.status();
}

TEST(Block, EndsALoopThatPollsForNothing) {
  std::string failure = FailureOf({.threads = 32, .spin_limit = 1000}, [&](const Place&) {
    for (;;) Poll(Here());
  });
  EXPECT_THAT(failure, HasSubstr("polls memory that nobody changes"));
}

TEST(Block, RunsAgainAfterAFailure) {
  EXPECT_NE(FailureOf({.threads = 32}, [](const Place&) { Fail("broken", Here()); }), "");
  EXPECT_EQ(FailureOf({.threads = 32}, [](const Place&) {}), "");
}

TEST(SharedMemory, RefusesAccessesOutsideTheBlocksBytes) {
  LaunchOptions options{.threads = 32, .shared_bytes = 64};
  EXPECT_THAT(FailureOf(options, [](const Place& at) { Store<int>((int*)(at.shared + 64), 1); }),
              HasSubstr("shared store of 4 bytes at offset 64 of 64"));
  EXPECT_THAT(FailureOf(options, [](const Place& at) { Store<int>((int*)(at.shared - 4), 1); }),
              HasSubstr("at offset -4"));
  EXPECT_THAT(FailureOf(options, [](const Place& at) { Store<int>((int*)(at.shared + 2), 1); }),
              HasSubstr("misaligned shared store"));
}

TEST(SharedMemory, RefusesReadsOfWhatNothingWrote) {
  LaunchOptions options{.grid = {2, 1, 1}, .threads = 32, .shared_bytes = 64};
  // The first block's contents are not the second's.
  EXPECT_THAT(FailureOf(options,
                        [](const Place& at) {
                          int* value = reinterpret_cast<int*>(at.shared);
                          if (at.thread == 0 && at.block.x == 0) Store(value, 1);
                          if (at.thread == 0) Load(value);
                        }),
              HasSubstr("block (1, 0, 0): thread 0 at block_test.cc:"));
}

TEST(SharedMemory, FindsRacesThatNoBarrierOrders) {
  LaunchOptions options{.threads = 64, .shared_bytes = 256};
  options.shared.detect_races = true;
  auto race = [&](const Kernel& kernel) { return FailureOf(options, kernel); };
  EXPECT_THAT(race([](const Place& at) {  // between warps, load after store
                int* values = reinterpret_cast<int*>(at.shared);
                Store(values + at.thread, 0);
                Load(values + (at.thread ^ 32));
              }),
              AnyOf(HasSubstr("race"), HasSubstr("which nothing wrote")));
  EXPECT_THAT(race([](const Place& at) {  // between warps, store after load, without a barrier
                int* values = reinterpret_cast<int*>(at.shared);
                Store(values + at.thread, 0);
                WaitAtBarrier(0, 0, Here());
                Load(values + (at.thread ^ 32));
                Store(values + at.thread, 1);
              }),
              HasSubstr("race: shared"));  // whichever comes second
  EXPECT_THAT(race([](const Place& at) {   // within a warp: a shuffle orders no memory
                int* values = reinterpret_cast<int*>(at.shared);
                Store(values + at.thread, 0);
                ShuffleXor(0, 1);
                Load(values + (at.thread ^ 1));
              }),
              HasSubstr("race: shared load"));
  EXPECT_EQ(race([](const Place& at) {  // within a warp, ordered
              int* values = reinterpret_cast<int*>(at.shared);
              Store(values + at.thread, 0);
              SynchroniseWarp(~0u, Here());
              Load(values + (at.thread ^ 1));
            }),
            "");
  EXPECT_THAT(race([](const Place& at) {  // neighbours share a word, not bytes: no race
                auto* values = reinterpret_cast<uint16_t*>(at.shared);
                Store<uint16_t>(values + at.thread, 0);
              }),
              "");
}

// Offsets of 32 lanes and what Volta needs for them.
Wavefronts Count(int bytes, const std::function<uint32_t(uint32_t)>& offset,
                 uint32_t active = ~0u) {
  uint32_t offsets[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) offsets[lane] = offset(lane);
  return CountWavefronts(offsets, active, bytes);
}

TEST(BankModel, CountsWhatVoltaNeeds) {
  struct Case {
    const char* name;
    int bytes;
    std::function<uint32_t(uint32_t)> offset;
    int wavefronts, conflicts;
  };
  const Case cases[] = {
      {"consecutive words", 4, [](uint32_t l) { return 4 * l; }, 1, 0},
      {"one word for all", 4, [](uint32_t) { return 8; }, 1, 0},
      {"stride of two words", 4, [](uint32_t l) { return 8 * l; }, 2, 1},
      {"one column of a 128-byte row", 4, [](uint32_t l) { return 128 * l; }, 32, 31},
      {"halves of one word", 2, [](uint32_t l) { return 2 * l; }, 1, 0},
      {"consecutive 8 bytes", 8, [](uint32_t l) { return 8 * l; }, 2, 0},
      {"8 bytes, 16 apart", 8, [](uint32_t l) { return 16 * l; }, 4, 2},
      {"8 bytes, halves of the warp collide", 8, [](uint32_t l) { return 8 * (l % 16); }, 2, 0},
      {"consecutive 16 bytes", 16, [](uint32_t l) { return 16 * l; }, 4, 0},
      {"16 bytes, rows of 128", 16, [](uint32_t l) { return 128 * l; }, 32, 28},
      {"16 bytes, rows of 128, swizzled", 16, [](uint32_t l) { return 128 * l + 16 * (l & 7); }, 4,
       0},
      {"16 bytes, rows of 144", 16, [](uint32_t l) { return 144 * l; }, 4, 0},
  };
  for (const Case& c : cases) {
    Wavefronts got = Count(c.bytes, c.offset);
    EXPECT_EQ(got.total, c.wavefronts) << c.name;
    EXPECT_EQ(got.conflicts, c.conflicts) << c.name;
  }
  EXPECT_EQ(Count(
                16, [](uint32_t l) { return 16 * l; }, 0xff)
                .total,
            1);  // idle quarters are free
}

TEST(BankModel, ReportsEachInstructionOfTheSource) {
  LaunchOptions options{.grid = {2, 1, 1}, .threads = 64, .shared_bytes = 64 * 128};
  options.shared.count_conflicts = true;
  auto report = Launch(options, [&](const Place& at) {
    for (int i = 0; i < 3; ++i) {
      Store(reinterpret_cast<int*>(at.shared) + at.thread + 64 * i, at.thread);
    }
    if (at.thread < 32) Store(reinterpret_cast<int*>(at.shared + 128 * at.thread), 1);
  });
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->banks.size(), 2u);
  EXPECT_EQ(report->banks[0].instructions, 2 * 2 * 3);
  EXPECT_EQ(report->banks[0].conflicts, 0);
  EXPECT_EQ(report->banks[1].instructions, 2);
  EXPECT_EQ(report->banks[1].wavefronts, 2 * 32);
  EXPECT_EQ(report->banks[1].conflicts, 2 * 31);
}

TEST(GlobalMemory, RefusesIllegalAccesses) {
  alignas(16) float in[4] = {}, out[4] = {};
  GlobalMemory memory;
  memory.Register(in, sizeof(in), Contents::kConstant, "in");
  memory.Register(out, sizeof(out), Contents::kUninitialised, "out");
  LaunchOptions options{.threads = 32, .memory = &memory};
  auto access = [&](const void* address, int bytes, Access kind) {
    return FailureOf(options, [&](const Place&) { CheckGlobal(address, bytes, kind, Here()); });
  };
  EXPECT_EQ(access(in + 3, 4, Access::kLoad), "");
  EXPECT_THAT(access(in + 4, 4, Access::kLoad),
              AnyOf(HasSubstr("at offset 16 of `in`, which has 16"), HasSubstr("nothing wrote")));
  EXPECT_THAT(access(in, 4, Access::kStore), HasSubstr("store at offset 0 of constant `in`"));
  EXPECT_THAT(access(in + 1, 8, Access::kLoad), HasSubstr("misaligned"));
  EXPECT_THAT(access(out, 4, Access::kLoad), HasSubstr("which nothing wrote"));
  EXPECT_THAT(access(out, 4, Access::kAtomic), HasSubstr("which nothing wrote"));
  EXPECT_EQ(memory.UnwrittenBytes(out), 16);
  EXPECT_EQ(access(out + 1, 4, Access::kStore), "");
  EXPECT_EQ(access(out + 1, 4, Access::kLoad), "");
  EXPECT_EQ(memory.UnwrittenBytes(out), 12);
  EXPECT_THAT(access(nullptr, 4, Access::kLoad), HasSubstr("before every buffer"));
}

}  // namespace
}  // namespace attnd::emulator
