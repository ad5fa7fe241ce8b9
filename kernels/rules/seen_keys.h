// How large the keys are that a row sees: the least bounds on ‖V‖ and max|K| from which backward
// scales a row of dS and of dQ (backward_passes.h). What a row does not see has no part in them, so
// that it changes no bit, however large.
//
// KeyBoundsKernel leaves a word (KeySize) for each key and one for each eight neighbours, their
// maximum. DeltaKernel asks SeenKeys for the rows of a tile. Causal, window and lengths show a row
// an interval of keys, whose maximum a few words tell. Under a mask or a bias a place is looked up,
// but only of a key larger than what all of the warp's rows have seen: where sizes are alike that
// is one key or two. Cost: a word for each eight keys a tile of 64 rows. Errors: none.
#pragma once

#include "kernels/rules/gradient_scale.h"
#include "kernels/rules/score_rules.h"

namespace attnd {

// Upper half: ‖V‖ < 2^((this − kNormBias)/2), or 0 where V is 0. Lower half: the biased exponent of
// max|K|. Larger is larger, half by half.
struct KeySize {
  static constexpr int kNormBias = 300;
  // `largest` is max|V|, for norms whose square is beyond float32.
  ATTN_HD static uint32_t Of(float squared_norm, float largest, float largest_k) {
    const uint32_t of_k = ptx::FloatBits(largest_k) >> 23;
    if (largest == 0) return of_k;
    const bool is_safe = IsSafe(squared_norm);
    // A row has at most 2^8 numbers.
    const int of_v = is_safe ? FloatExponent(squared_norm) + 1 : 2 * FloatExponent(largest) + 10;
    return static_cast<uint32_t>(of_v + kNormBias) << 16 | of_k;
  }
  ATTN_HD static bool IsSafe(float squared_norm) {
    return squared_norm > 0x1p-100f && squared_norm < Infinity();
  }
  ATTN_HD static uint32_t Max(uint32_t a, uint32_t b) {
    return Larger(a & kOfV, b & kOfV) | Larger(a & kOfK, b & kOfK);
  }
  ATTN_HD static uint32_t Min(uint32_t a, uint32_t b) { return ~Max(~a, ~b); }
  // Tells whether a half of `a` is larger than that of `b`.
  ATTN_HD static bool Exceeds(uint32_t a, uint32_t b) {
    return (a & kOfV) > (b & kOfV) || (a & kOfK) > (b & kOfK);
  }
  ATTN_HD static float NormOf(uint32_t size) {
    const int of_v = static_cast<int>(size >> 16);
    return of_v == 0 ? 0.0f : ptx::Exp2(0.5f * static_cast<float>(of_v - kNormBias));
  }
  // max|K| < 2^(this + 1).
  ATTN_HD static int KeyExponent(uint32_t size) { return static_cast<int>(size & kOfK) - 127; }

 private:
  static constexpr uint32_t kOfV = 0xffff0000u, kOfK = 0xffffu;
  ATTN_HD static uint32_t Larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
};

// Sizes of the keys of a KV head, then those of groups of kKeyGroup neighbours.
struct KeySizes {
  uint32_t *keys, *groups;
  ATTN_HD KeySizes(const ProblemDesc& p, int batch, int kv_head)
      : keys(p.key_sizes + (int64_t{batch} * p.kv_heads + kv_head) * KeySizeWords(p.most_keys)),
        groups(keys + p.most_keys) {}
};

// 256 threads share it, four a row.
class SeenKeys {
 public:
  static constexpr int kWarps = 8;
  struct Shared {
    uint32_t of_warps[kWarps][kDqBlockRows];
  };

  ATTN_HD SeenKeys(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile, int thread)
      : at_{p, s, tile.batch, tile.head, GeneralScores::OptionsOf(p)},
        sizes_(p, tile.batch, tile.head / p.group),
        first_row_(tile.tile * kDqBlockRows),
        end_row_(MinInt(first_row_ + kDqBlockRows, s.q_len)),
        warp_(thread >> 5),
        lane_(thread & 31) {}

  // The size of all that the thread's row sees; of one that sees nothing it means nothing. By all
  // threads.
  ATTN_HD uint32_t OfRow(Shared& shared) const {
    const int row = warp_ * 8 + (lane_ >> 2);  // of the tile
    const bool hides = at_.problem.tile_lists.lines != nullptr || at_.problem.bias.data != nullptr;
    const uint32_t own = hides ? FindShown(row, shared) : FindInIntervals(row, shared);
    return MaxOver<3>(own);
  }

 private:
  // Returns the largest over lanes that differ in bits of `kMask`, 2^n − 1.
  template <int kMask>
  ATTN_HD static uint32_t MaxOver(uint32_t size) {
#pragma unroll
    for (int mask = 1; mask <= kMask; mask *= 2) {
      size = KeySize::Max(size, ptx::ShuffleXor(size, mask));
    }
    return size;
  }
  ATTN_HD Visibility Visible() const { return VisibilityOf(at_.sequence); }

  // ---- A row sees an interval: what all of the tile's rows see, which all threads share, and what
  // is left of it at either end. Returns a quarter of the row's.
  ATTN_HD uint32_t FindInIntervals(int row, Shared& shared) const {
    const Range all = KeysVisibleToAll(Visible(), first_row_, end_row_);
    const int begin = (all.begin + kKeyGroup - 1) / kKeyGroup;
    const int end = MaxInt(begin, all.end / kKeyGroup);
    uint32_t common = 0;
#pragma unroll 4
    for (int n = begin + warp_ * 32 + lane_; n < end; n += kWarps * 32) {
      common = KeySize::Max(common, ptx::LoadGlobal32(sizes_.groups + n));
    }
    common = MaxOver<31>(common);
    ptx::SyncThreads();  // the tile before is done
    if (lane_ == 0) ptx::StoreShared32(&shared.of_warps[warp_][0], common);
    ptx::SyncThreads();
    uint32_t size = ptx::LoadShared32(&shared.of_warps[lane_ & 7][0]);
    size = KeySize::Max(size, ptx::ShuffleXor(size, 4));
    const int own_row = first_row_ + row;
    if (own_row >= end_row_) return 0;
    const Range own = VisibleKeys(Visible(), own_row, own_row + 1);
    if (begin == end) return InInterval(own.begin, own.end);
    size = KeySize::Max(size, InInterval(own.begin, begin * kKeyGroup));
    return KeySize::Max(size, InInterval(end * kKeyGroup, own.end));
  }
  // A quarter of the keys [begin, end), which belongs to the lane.
  ATTN_HD uint32_t InInterval(int begin, int end) const {
    const int first = (begin + kKeyGroup - 1) / kKeyGroup, last = end / kKeyGroup;
    if (first >= last) return Largest(sizes_.keys, begin, end);
    uint32_t size = Largest(sizes_.keys, begin, first * kKeyGroup);
    size = KeySize::Max(size, Largest(sizes_.groups, first, last));
    return KeySize::Max(size, Largest(sizes_.keys, last * kKeyGroup, end));
  }
  ATTN_HD uint32_t Largest(const uint32_t* sizes, int begin, int end) const {
    uint32_t size = 0;
    for (int n = begin + (lane_ & 3); n < end; n += 4) {
      size = KeySize::Max(size, ptx::LoadGlobal32(sizes + n));
    }
    return size;
  }

  // ---- A mask or a bias tells. A warp looks at every eighth 32 keys, a lane at two rows. Warps
  // tell each other what rows have seen after 1, 2, 4, … of them: most is known after the first.
  ATTN_HD uint32_t FindShown(int row, Shared& shared) const {
    const Range keys = VisibleKeys(Visible(), first_row_, end_row_);
    const int begin = keys.begin & -32,
              rounds = (keys.end - begin + 32 * kWarps - 1) / (32 * kWarps);
    if (rounds <= 0) return 0;
    Rows rows(*this);
    SetLeast(rows);
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
      LookAt(begin + (n * kWarps + warp_) * 32, keys, rows);
      if ((n & (n + 1)) == 0 || n + 1 == rounds) Exchange(shared, rows);
    }
    return ptx::LoadShared32(&shared.of_warps[0][row]);
  }
  // Rows holds what a warp knows of rows `lane` and 32 + `lane` of the tile. Rows that do not exist
  // or that forward found to see nothing count as if they had seen all.
  struct Rows {
    uint32_t size[2];
    uint32_t least;  // of all 64 rows, half by half
    MaskLookup mask;
    ATTN_HD explicit Rows(const SeenKeys& of)
        : least(0), mask(of.at_.problem.tile_lists, of.at_.batch, of.at_.head) {
      const ProblemDesc& p = of.at_.problem;
      const SequenceDesc& s = of.at_.sequence;
      const float* lse = p.lse + s.batch * p.lse_batch + of.at_.head * p.lse_head + s.q_begin;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = of.first_row_ + n * 32 + of.lane_;
        float own = -Infinity();
        ptx::LoadConstantFloatIf(own, lse + row, row < of.end_row_);
        size[n] = own == -Infinity() ? ~0u : 0u;
      }
    }
  };
  // All threads call it.
  ATTN_HD void Exchange(Shared& shared, Rows& rows) const {
    ptx::SyncThreads();  // all have read what was here
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::StoreShared32(&shared.of_warps[warp_][n * 32 + lane_], rows.size[n]);
    }
    ptx::SyncThreads();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        rows.size[n] =
            KeySize::Max(rows.size[n], ptx::LoadShared32(&shared.of_warps[warp][n * 32 + lane_]));
      }
    }
    ptx::SyncThreads();
    if (warp_ == 0) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::StoreShared32(&shared.of_warps[0][n * 32 + lane_], rows.size[n]);
      }
    }
    ptx::SyncThreads();
    SetLeast(rows);
  }
  ATTN_HD static void SetLeast(Rows& rows) {
    rows.least = KeySize::Min(rows.size[0], rows.size[1]);
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      rows.least = KeySize::Min(rows.least, ptx::ShuffleXor(rows.least, mask));
    }
  }
  // The 32 keys from `first` on: those that are larger than what some row has seen, four at a time,
  // so that their places are under way together.
  ATTN_HD void LookAt(int first, Range keys, Rows& rows) const {
    constexpr int kAhead = 4;
    const bool exists = IsInside(keys, first + lane_);
    const uint32_t size = exists ? ptx::LoadGlobal32(sizes_.keys + first + lane_) : 0;
    uint32_t left = ptx::Ballot(exists && KeySize::Exceeds(size, rows.least));
    if (left == 0 || !IsAnyShown(first, rows.mask)) return;
#pragma unroll 1
    while (left != 0) {
      uint32_t seen[2] = {rows.size[0], rows.size[1]};
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (left == 0) continue;
        const int key = first + ptx::CountBits((left & (0u - left)) - 1);  // of the first of them
        left &= left - 1;
        const uint32_t of_key = ptx::LoadGlobal32(sizes_.keys + key);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = first_row_ + r * 32 + lane_;
          if (KeySize::Exceeds(of_key, rows.size[r]) &&
              GeneralScores::IsVisible(at_, rows.mask, row, key)) {
            seen[r] = KeySize::Max(seen[r], of_key);
          }
        }
      }
      rows.size[0] = seen[0];
      rows.size[1] = seen[1];
      SetLeast(rows);
      left &= ptx::Ballot(KeySize::Exceeds(size, rows.least));
    }
  }
  // Tells whether the mask shows some row something of the 32 keys.
  ATTN_HD bool IsAnyShown(int first_key, MaskLookup& mask) const {
    const TileLists& lists = at_.problem.tile_lists;
    if (lists.lines == nullptr) return true;
    bool shown = false;
    for (int row = first_row_; row < end_row_; row += lists.tile_rows) {
      shown |= mask.TileEntry(row / lists.tile_rows, first_key / lists.tile_keys) !=
               MaskLookup::kNothing;
    }
    return shown;
  }

  const ScoreContext at_;
  const KeySizes sizes_;
  const int first_row_, end_row_, warp_, lane_;
};

}  // namespace attnd
