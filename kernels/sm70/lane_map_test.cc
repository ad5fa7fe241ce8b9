// The lane maps of sm70/tile_math.h: every score on one lane, one dropout call a lane, and no bank
// conflicts on operand loads. Pure arithmetic; the products themselves are the conformance table's.
#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/rules/tile_lists.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {
namespace {

template <class Math>
void ExpectEachScoreOnce() {
  std::set<std::pair<int, int>> seen;
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) seen.insert({Math::Row(e, lane), Math::Col(e, lane)});
  }
  EXPECT_EQ(seen.size(), 256u);
  EXPECT_EQ(*seen.begin(), std::make_pair(0, 0));
  EXPECT_EQ(*seen.rbegin(), std::make_pair(15, 15));
}

TEST(LaneMap, HitsEachScoreOnceWithFloat32Accumulators) {
  ExpectEachScoreOnce<Float32Accumulate>();
}
TEST(LaneMap, HitsEachScoreOnceWithFloat16Accumulators) {
  ExpectEachScoreOnce<Float16Accumulate>();
}

// PTX ISA, m8n8k4: lane t + 4·(lane ≥ 16) of a quad-pair holds that row of A and column of B;
// element e of an .f32 accumulator is row (lane&1) + (e&2) + 4·(lane ≥ 16), column (e&1) + (lane&2)
// + (e&4).
TEST(LaneMap, GivesAccumulatorsTheNumbersOfTheirOperands) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      const int row = (lane & 1) + (e & 2) + (lane >> 4) * 4;
      const int column = (e & 1) + (lane & 2) + (e & 4);
      const int row_lane = (lane & 12) | (row & 3) | (row >> 2) << 4;
      const int column_lane = (lane & 12) | (column & 3) | (column >> 2) << 4;
      EXPECT_EQ(Float32Accumulate::Row(e, lane), Lane{row_lane}.OperandRow());
      EXPECT_EQ(Float32Accumulate::Col(e, lane), Lane{column_lane}.OperandKey());
    }
  }
}

// attention/dropout.h: a call serves rows {r, r + 8} and keys {2c, 2c + 1} + 8t of a 16×32 block.
TEST(LaneMap, GivesALaneExactlyOneDropoutCallOf32Keys) {
  for (int lane = 0; lane < 32; ++lane) {
    std::set<int> calls, bytes;
    for (int group = 0; group < 2; ++group) {
      for (int e = 0; e < 8; ++e) {
        const int row = Float32Accumulate::Row(e, lane);
        const int key = Float32Accumulate::Col(e, lane) + 16 * group;
        calls.insert((row & 7) * 4 + ((key & 7) >> 1));
        bytes.insert((row >> 3) * 8 + (key >> 3) * 2 + (key & 1));
      }
    }
    EXPECT_EQ(calls.size(), 1u) << "lane " << lane;
    EXPECT_EQ(bytes.size(), 16u) << "lane " << lane;
  }
}

// Wavefronts of an LDS.128: a quarter of the warp at a time, 32 banks of four bytes.
int Wavefronts(const std::vector<int>& offsets) {
  int total = 0;
  for (int quarter = 0; quarter < 4; ++quarter) {
    std::map<int, std::set<int>> words_of_bank;
    for (int lane = quarter * 8; lane < quarter * 8 + 8; ++lane) {
      for (int word = offsets[lane] / 4; word < offsets[lane] / 4 + 4; ++word) {
        words_of_bank[word % 32].insert(word);
      }
    }
    int most = 0;
    for (const auto& [bank, words] : words_of_bank) {
      most = std::max(most, static_cast<int>(words.size()));
    }
    total += most;
  }
  return total;
}

TEST(LaneMap, LoadsOperandsWithoutBankConflicts) {
  for (int chunks : {8, 16, 32}) {
    for (int chunk = 0; chunk < 4; ++chunk) {
      std::vector<int> by_columns(32);
      for (int lane = 0; lane < 32; ++lane) {
        by_columns[lane] = ChunkOffset(Lane{lane}.OperandKey(), chunk, chunks);
      }
      EXPECT_EQ(Wavefronts(by_columns), 4) << chunks << " chunks, chunk " << chunk;
    }
    for (int step = 0; step < 2; ++step) {
      for (int other = 0; other < 2; ++other) {
        std::vector<int> by_rows(32);
        for (int l = 0; l < 32; ++l) {
          const Lane lane = {l};
          by_rows[l] = ChunkOffset(lane.ValueKey(step, other),
                                   lane.column_half() * 2 + lane.upper(), chunks);
        }
        EXPECT_EQ(Wavefronts(by_rows), 4) << chunks << " chunks, step " << step;
      }
    }
  }
}

// Each byte of a lane's word is one 16×16 tile of the square: bit 16·(y tile) + 8·(x tile) + e.
TEST(LaneMap, PutsTheBitsOfMasksWhereScoresAre) {
  for (int x = 0; x < 32; ++x) {
    for (int y = 0; y < 32; ++y) {
      const int lane = MaskWordOf<kLanesOfSm70>::LaneOf(x, y),
                bit = MaskWordOf<kLanesOfSm70>::BitOf(x, y);
      const int e = bit & 7;
      EXPECT_EQ(Float32Accumulate::Row(e, lane) + 16 * (bit >> 3 & 1), x);
      EXPECT_EQ(Float32Accumulate::Col(e, lane) + 16 * (bit >> 4), y);
    }
  }
}

TEST(LaneMap, MakesWordsOfRowsOrColumns) {
  std::vector<uint32_t> rows;
  for (uint32_t n = 0; n < 32; ++n) rows.push_back(n * 2654435761u ^ n << 27);
  const auto row = [&rows](int n) { return rows[n]; };
  for (int x = 0; x < 32; ++x) {
    for (int y = 0; y < 32; ++y) {
      const int lane = MaskWordOf<kLanesOfSm70>::LaneOf(x, y),
                bit = MaskWordOf<kLanesOfSm70>::BitOf(x, y);
      EXPECT_EQ(MaskWordOf<kLanesOfSm70>::FromRows(lane, row) >> bit & 1, rows[x] >> y & 1);
      EXPECT_EQ(MaskWordOf<kLanesOfSm70>::FromColumns(lane, row) >> bit & 1, rows[y] >> x & 1);
    }
    const auto word = [&](int y) {
      return MaskWordOf<kLanesOfSm70>::FromRows(MaskWordOf<kLanesOfSm70>::LaneOf(x, y), row);
    };
    EXPECT_EQ(MaskWordOf<kLanesOfSm70>::AlongY(x, word), rows[x]);
  }
}

TEST(LaneMap, MovesWithinALineByExclusiveOr) {
  for (int row = 0; row < 32; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      EXPECT_EQ(ChunkOffset(row, chunk, 16), ChunkOffset(row, 0, 16) ^ chunk * 16);
    }
  }
}

}  // namespace
}  // namespace attnd::sm70
