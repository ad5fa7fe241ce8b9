// ColumnSumsKernel: gradients of biases and norms (ColumnSumsDesc): sums over rows of kSumColumns
// columns a block. A thread sums a stretch of kSumStretch rows, four columns of it where rows are
// whole groups of four, else one; one warp adds the stretches of a part in order to those of the
// parts before in its block of rows. Parts are summed side by side; those of a block of rows take
// turns to add. The last block of rows to be done adds all blocks' sums, in their order, to what
// stands there. So calls cut at blocks of rows give the bits of one.
#pragma once

#include "kernels/dense/norm.h"

namespace attnd {

struct ColumnSumsKernel {
  static constexpr int kThreads = kSumThreads;
  static constexpr int kMostStretches = kSumMostRows / kSumStretch;
  struct Shared {
    float sums[kMostStretches][kSumColumns], weight_sums[kMostStretches][kSumColumns];
  };
  static_assert(kSumColumns == 32 && kSumMostRows % kSumStretch == 0);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const auto* of = static_cast<const ColumnSumsDesc*>(params.dense);
    int block = at.block;
    while (block >= of->blocks) block -= of++->blocks;
    const ColumnSumsDesc d = *of;  // read at once
    const int warp = at.thread >> 5, lane = at.thread & 31;
    const Part part = PartOf(d, block);
    const int column = part.group * kSumColumns + lane;
    if (d.weight_sums == nullptr) {
      SumStretches<false>(d, part, at.thread, shared);
    } else {
      SumStretches<true>(d, part, at.thread, shared);
    }
    ptx::SyncThreads();
    if (warp == 0) AddPart(d, part, column, lane, shared);
  }

 private:
  struct Sums {
    float sum = 0, weight_sum = 0;
  };
  struct Part {
    int group, row_block, within;  // the part's number in its block of rows
    int64_t begin, end;            // rows
    bool ends_block;
    ATTN_HD int Stretches() const {
      return static_cast<int>((end - begin + kSumStretch - 1) / kSumStretch);
    }
  };

  ATTN_HD static Part PartOf(const ColumnSumsDesc& d, int block) {
    const int groups = SumGroups(d), of_block = SumPartsOfBlock(d);
    const int number = block / groups, within = number % of_block;
    const int row_block = number / of_block;
    const int64_t of_rows = row_block * d.block_rows;
    const int64_t block_end = of_rows + d.block_rows < d.rows ? of_rows + d.block_rows : d.rows;
    const int64_t begin = of_rows + int64_t{within} * kSumMostRows;
    const int64_t end = begin + kSumMostRows < block_end ? begin + kSumMostRows : block_end;
    return {block % groups, row_block, within, begin, end, end == block_end};
  }

  // Tells whether rows are whole groups of four numbers, as those of d.in.
  ATTN_HD static bool IsWhole(const ColumnSumsDesc& d, const DenseTensor& t) {
    return t.element == d.in.element && reinterpret_cast<uint64_t>(t.data) % 16 == 0 &&
           d.columns % 4 == 0;
  }

  // The columns of a row that a thread sums together.
  struct OneNumber {
    static constexpr int kColumns = 1;
    using Word = float;
    ATTN_HD static Word Load(const DenseTensor& t, int64_t index) { return LoadNumber(t, index); }
    ATTN_HD static void Unpack(Word word, float (&numbers)[1]) { numbers[0] = word; }
  };
  struct FourFloats {
    static constexpr int kColumns = 4;
    using Word = uint4;
    ATTN_HD static Word Load(const DenseTensor& t, int64_t index) {
      return ptx::LoadGlobal128(static_cast<const float*>(t.data) + index);
    }
    ATTN_HD static void Unpack(Word word, float (&numbers)[4]) {
      numbers[0] = ptx::BitsFloat(word.x), numbers[1] = ptx::BitsFloat(word.y);
      numbers[2] = ptx::BitsFloat(word.z), numbers[3] = ptx::BitsFloat(word.w);
    }
  };
  template <class Element>
  struct FourHalves {
    static constexpr int kColumns = 4;
    using Word = uint2;
    ATTN_HD static Word Load(const DenseTensor& t, int64_t index) {
      return ptx::LoadGlobal64(static_cast<const uint16_t*>(t.data) + index);
    }
    ATTN_HD static void Unpack(Word word, float (&numbers)[4]) {
      numbers[0] = Element::Low(word.x), numbers[1] = Element::High(word.x);
      numbers[2] = Element::Low(word.y), numbers[3] = Element::High(word.y);
    }
  };

  template <bool kOfNorm>
  ATTN_HD static void SumStretches(const ColumnSumsDesc& d, const Part& part, int thread,
                                   Shared& shared) {
    if (!IsWhole(d, d.in) || (kOfNorm && !IsWhole(d, d.x))) {
      SumStretchesBy<kOfNorm, OneNumber>(d, part, thread, shared);
    } else if (d.in.element == kBiasFloat32) {
      SumStretchesBy<kOfNorm, FourFloats>(d, part, thread, shared);
    } else if (d.in.element == kBiasFloat16) {
      SumStretchesBy<kOfNorm, FourHalves<Float16>>(d, part, thread, shared);
    } else {
      SumStretchesBy<kOfNorm, FourHalves<BFloat16>>(d, part, thread, shared);
    }
  }
  template <bool kOfNorm, class Columns>
  ATTN_HD static void SumStretchesBy(const ColumnSumsDesc& d, const Part& part, int thread,
                                     Shared& shared) {
    constexpr int kOfStretch = kSumColumns / Columns::kColumns;  // threads
    const int within = thread % kOfStretch * Columns::kColumns;
    const int column = part.group * kSumColumns + within;
#pragma unroll 1
    for (int n = thread / kOfStretch; n < part.Stretches(); n += kThreads / kOfStretch) {
      Sums sums[Columns::kColumns];
      if (column < d.columns) SumStretch<kOfNorm, Columns>(d, part, n, column, sums);
#pragma unroll
      for (int c = 0; c < Columns::kColumns; ++c) {
        ptx::StoreSharedFloat(&shared.sums[n][within + c], sums[c].sum);
        if constexpr (kOfNorm) {
          ptx::StoreSharedFloat(&shared.weight_sums[n][within + c], sums[c].weight_sum);
        }
      }
    }
  }
  // Loads of some rows wait together.
  template <bool kOfNorm, class Columns>
  ATTN_HD static void SumStretch(const ColumnSumsDesc& d, const Part& part, int stretch, int column,
                                 Sums (&sums)[Columns::kColumns]) {
    constexpr int kRows = (kOfNorm ? 4 : 8) / (sizeof(typename Columns::Word) > 8 ? 2 : 1);
    const int64_t first = part.begin + int64_t{stretch} * kSumStretch;
    const int64_t end = part.end - first < kSumStretch ? part.end : first + kSumStretch;
    const bool rounds = d.operand != d.in.element;
#pragma unroll 1
    for (int64_t row = first; row < end; row += kRows) {
      const auto left = static_cast<int>(end - row);
      const int64_t index = row * d.columns + column;
      typename Columns::Word in[kRows], x[kRows];
      uint2 statistics[kRows];
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (n >= left) break;
        in[n] = Columns::Load(d.in, index + int64_t{n} * d.columns);
        if constexpr (kOfNorm) {
          x[n] = Columns::Load(d.x, index + int64_t{n} * d.columns);
          statistics[n] = ptx::LoadGlobal64(&d.statistics[row + n]);
        }
      }
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (n >= left) break;
        float numbers[Columns::kColumns], of_x[Columns::kColumns];
        Columns::Unpack(in[n], numbers);
        if constexpr (kOfNorm) Columns::Unpack(x[n], of_x);
#pragma unroll
        for (int c = 0; c < Columns::kColumns; ++c) {
          const float number = rounds ? RoundTo(d.operand, numbers[c]) : numbers[c];
          sums[c].sum = ptx::Add(sums[c].sum, number);
          if constexpr (kOfNorm) {
            const DenseStatistics of = {ptx::BitsFloat(statistics[n].x),
                                        ptx::BitsFloat(statistics[n].y)};
            const float normalised = RoundTo(d.round_element, Normalised(of, of_x[c]));
            sums[c].weight_sum = ptx::Fma(number, normalised, sums[c].weight_sum);
          }
        }
      }
    }
  }

  // Adds the part's stretches to `before`, in order.
  ATTN_HD static Sums SumOfStretches(const Part& part, int lane, Shared& shared, bool of_norm,
                                     Sums before) {
#pragma unroll 8
    for (int n = 0; n < part.Stretches(); ++n) {
      before.sum = ptx::Add(before.sum, ptx::LoadSharedFloat(&shared.sums[n][lane]));
      if (of_norm) {
        before.weight_sum =
            ptx::Add(before.weight_sum, ptx::LoadSharedFloat(&shared.weight_sums[n][lane]));
      }
    }
    return before;
  }

  // Adds a part by one warp.
  ATTN_HD static void AddPart(const ColumnSumsDesc& d, const Part& part, int column, int lane,
                              Shared& shared) {
    const bool of_norm = d.weight_sums != nullptr, is_there = column < d.columns;
    int32_t* const done = d.turns + part.group;
    int32_t* const turn = done + int64_t{1 + part.row_block} * SumGroups(d);
    float* const carry = d.carries + part.row_block * SumsOfBlock(d) + column;
    Sums sums;
    if (part.within != 0) {
      if (lane == 0) {
        while (ptx::LoadAcquire(turn) != part.within) {
        }
      }
      ptx::SyncWarp();
      if (is_there) {
        sums = {ptx::LoadGlobalFloat(carry), of_norm ? ptx::LoadGlobalFloat(carry + d.columns) : 0};
      }
    }
    sums = SumOfStretches(part, lane, shared, of_norm, sums);
    if (SumParts(d) == 1) {
      if (is_there && d.sums != nullptr) Add(d.sums + column, sums.sum);
      if (is_there && of_norm) Add(d.weight_sums + column, sums.weight_sum);
      return;
    }
    if (is_there) {
      ptx::StoreGlobalFloat(carry, sums.sum);
      if (of_norm) ptx::StoreGlobalFloat(carry + d.columns, sums.weight_sum);
    }
    ptx::SyncWarp();
    const auto row_blocks = static_cast<int>(SumRowBlocks(d));
    bool is_last = false;
    if (lane == 0) {
      if (!part.ends_block || part.within != 0) {
        ptx::StoreRelease(turn, part.ends_block ? 0 : part.within + 1);
      }
      is_last = part.ends_block && ptx::AddAcquireRelease(done, 1) == row_blocks - 1;
    }
    if (!ptx::VoteAny(is_last)) return;
    if (is_there) {
      const float* const first = d.carries + column;
      if (d.sums != nullptr) AddBlocks(d, row_blocks, first, d.sums + column);
      if (of_norm) AddBlocks(d, row_blocks, first + d.columns, d.weight_sums + column);
    }
    if (lane == 0) ptx::StoreRelease(done, 0);
  }
  ATTN_HD static void AddBlocks(const ColumnSumsDesc& d, int row_blocks, const float* from,
                                float* to) {
    constexpr int kTogether = 8;
    const int64_t stride = SumsOfBlock(d);
    float sum = ptx::LoadGlobalFloat(to);
    for (int first = 0; first < row_blocks; first += kTogether) {
      float of_block[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        of_block[n] =
            first + n < row_blocks ? ptx::LoadGlobalFloat(from + (first + n) * stride) : 0;
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (first + n < row_blocks) sum = ptx::Add(sum, of_block[n]);
      }
    }
    ptx::StoreGlobalFloat(to, sum);
  }

  ATTN_HD static void Add(float* to, float sum) {
    ptx::StoreGlobalFloat(to, ptx::Add(ptx::LoadGlobalFloat(to), sum));
  }
};

}  // namespace attnd
