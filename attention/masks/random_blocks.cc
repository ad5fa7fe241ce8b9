#include "attention/masks/random_blocks.h"

#include <algorithm>
#include <array>
#include <unordered_map>

namespace attnd {
namespace {

using Words = std::array<uint32_t, 4>;

// Philox4x32 with ten rounds (Salmon et al., SC'11).
Words Philox4x32x10(Words counter, uint32_t key_lo, uint32_t key_hi) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key_lo,
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key_hi,
               static_cast<uint32_t>(product0)};
    key_lo += 0x9E3779B9u;
    key_hi += 0xBB67AE85u;
  }
  return counter;
}

// The candidates in ascending order, of which some have been swapped.
class Candidates {
 public:
  Candidates(int64_t key_blocks, const std::vector<KeyRun>& excluded) : count_(key_blocks) {
    for (const KeyRun& run : excluded) {
      count_ -= run.end - run.begin;
      // Candidates from this one on stand after the run.
      after_.push_back({run.end - (key_blocks - count_), key_blocks - count_});
    }
  }
  int64_t count() const { return count_; }

  // Swaps candidates n and x ≥ n, and gives the one that then is the n-th.
  int64_t Take(int64_t n, int64_t x) {
    const int64_t taken = At(x);
    swapped_[x] = At(n);
    return taken;
  }

 private:
  struct After {
    int64_t candidate, excluded;  // from this candidate on so many blocks are left out
  };
  int64_t At(int64_t n) const {
    if (auto found = swapped_.find(n); found != swapped_.end()) return found->second;
    const auto after =
        std::upper_bound(after_.begin(), after_.end(), n,
                         [](int64_t at, const After& a) { return at < a.candidate; });
    return after == after_.begin() ? n : n + (after - 1)->excluded;
  }

  int64_t count_;
  std::vector<After> after_;
  std::unordered_map<int64_t, int64_t> swapped_;
};

}  // namespace

std::vector<uint32_t> DrawRandomBlocks(const RandomBlocks& random, int64_t row_block, int64_t head,
                                       int64_t key_blocks, const std::vector<KeyRun>& excluded) {
  Candidates candidates(key_blocks, excluded);
  const int64_t m = candidates.count(), count = std::min<int64_t>(random.per_row, m);
  std::vector<uint32_t> drawn;
  Words words = {};
  for (int64_t n = 0; n < count; ++n) {
    if (n % 4 == 0) {
      words = Philox4x32x10({static_cast<uint32_t>(n / 4), static_cast<uint32_t>(row_block),
                             random.per_head ? static_cast<uint32_t>(head) : 0, 0x6D61736Bu},
                            static_cast<uint32_t>(random.seed),
                            static_cast<uint32_t>(random.seed >> 32));
    }
    const uint64_t word = words[static_cast<size_t>(n % 4)];
    const int64_t x = n + static_cast<int64_t>(word * static_cast<uint64_t>(m - n) >> 32);
    drawn.push_back(static_cast<uint32_t>(candidates.Take(n, x)));
  }
  return drawn;
}

}  // namespace attnd
