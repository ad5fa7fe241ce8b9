// ColumnSumsKernel: gradients of biases and norms (ColumnSumsDesc): sums over rows of kSumColumns
// columns a block. A thread sums a stretch of kSumStretch rows, eight columns of it where rows are
// whole 16 bytes, else one; one warp adds the stretches of a part in order to those of the parts
// before in its block of rows, and the sum of a block of rows to what stands there. Parts are
// summed side by side. Where each is a block of rows, the last one to be done adds all of them, in
// their order; else they take turns to add. So calls cut at blocks of rows give the bits of one.
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
    const ColumnSumsDesc d = *static_cast<const ColumnSumsDesc*>(params.dense);  // read at once
    const int warp = at.thread >> 5, lane = at.thread & 31;
    const Part part = PartOf(d, at.block);
    const int column = part.group * kSumColumns + lane;
    if (!IsWhole(d, d.in) || (d.weight_sums != nullptr && !IsWhole(d, d.x))) {
      SumStretches<OneColumn>(d, part, at.thread, shared);
    } else if (d.in.element == kBiasFloat32) {
      SumStretches<EightFloats>(d, part, at.thread, shared);
    } else {
      SumStretches<EightHalves>(d, part, at.thread, shared);
    }
    ptx::SyncThreads();
    if (warp != 0) return;
    if (SumPartsOfBlock(d) == 1) {
      AddTogether(d, part, column, lane, shared);
    } else {
      AddInTurn(d, part, column, lane, shared);
    }
  }

 private:
  struct Sums {
    float sum = 0, weight_sum = 0;
  };
  struct Part {
    int group, number;
    int64_t begin, end;  // rows
    bool begins_block, ends_block, is_last;
    ATTN_HD int Stretches() const {
      return static_cast<int>((end - begin + kSumStretch - 1) / kSumStretch);
    }
  };

  ATTN_HD static Part PartOf(const ColumnSumsDesc& d, int block) {
    const int groups = SumGroups(d), of_block = SumPartsOfBlock(d);
    const int number = block / groups, within = number % of_block;
    const int64_t of_rows = number / of_block * d.block_rows;
    const int64_t block_end = of_rows + d.block_rows < d.rows ? of_rows + d.block_rows : d.rows;
    const int64_t begin = of_rows + int64_t{within} * kSumMostRows;
    const int64_t end = begin + kSumMostRows < block_end ? begin + kSumMostRows : block_end;
    return {block % groups, number, begin, end, within == 0, end == block_end, end == d.rows};
  }

  // Tells whether rows are whole 16 bytes.
  ATTN_HD static bool IsWhole(const ColumnSumsDesc& d, const DenseTensor& t) {
    return t.element == d.in.element && reinterpret_cast<uint64_t>(t.data) % 16 == 0 &&
           d.columns % kNeighbours == 0;
  }

  // Columns that a thread sums together: how it brings some rows of them, whose loads wait
  // together, and their numbers.
  struct OneColumn {
    static constexpr int kColumns = 1, kRows = 8;
    using Words = float[kRows];
    ATTN_HD static void Load(const DenseTensor& t, int64_t index, int step, int rows, Words& to) {
      LoadNumbers(t, rows, Strided{index, step}, to);
    }
    ATTN_HD static void Unpack(const DenseTensor&, float word, float (&numbers)[1]) {
      numbers[0] = word;
    }
  };
  struct EightFloats {
    static constexpr int kColumns = kNeighbours, kRows = 4;
    using Words = float[kRows][kNeighbours];
    ATTN_HD static void Load(const DenseTensor& t, int64_t index, int step, int rows, Words& to) {
      const char* at = PlaceOf(t, index);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (n < rows) LoadFloats(ptx::Offset(at, n, step * 4), to[n]);
      }
    }
    ATTN_HD static void Unpack(const DenseTensor&, const float (&words)[kNeighbours],
                               float (&numbers)[kNeighbours]) {
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) numbers[n] = words[n];
    }
  };
  struct EightHalves {
    static constexpr int kColumns = kNeighbours, kRows = 4;
    using Words = uint4[kRows];
    ATTN_HD static void Load(const DenseTensor& t, int64_t index, int step, int rows, Words& to) {
      const char* at = PlaceOf(t, index);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (n < rows) to[n] = ptx::LoadGlobal128(ptx::Offset(at, n, step * 2));
      }
    }
    ATTN_HD static void Unpack(const DenseTensor& t, const uint4& words,
                               float (&numbers)[kNeighbours]) {
      if (t.element == kBiasFloat16) {
        attnd::Unpack<Float16>(words, numbers);
      } else {
        attnd::Unpack<BFloat16>(words, numbers);
      }
    }
  };

  template <class Columns>
  ATTN_HD static void SumStretches(const ColumnSumsDesc& d, const Part& part, int thread,
                                   Shared& shared) {
    constexpr int kOfStretch = kSumColumns / Columns::kColumns;  // threads
    const int within = thread % kOfStretch * Columns::kColumns;
    const int column = part.group * kSumColumns + within;
    for (int n = thread / kOfStretch; n < part.Stretches(); n += kThreads / kOfStretch) {
      Sums sums[Columns::kColumns];
      if (column < d.columns) SumStretch<Columns>(d, part, n, column, sums);
#pragma unroll
      for (int c = 0; c < Columns::kColumns; ++c) {
        ptx::StoreSharedFloat(&shared.sums[n][within + c], sums[c].sum);
        ptx::StoreSharedFloat(&shared.weight_sums[n][within + c], sums[c].weight_sum);
      }
    }
  }
  template <class Columns>
  ATTN_HD static void SumStretch(const ColumnSumsDesc& d, const Part& part, int stretch, int column,
                                 Sums (&sums)[Columns::kColumns]) {
    constexpr int kRows = Columns::kRows;
    const int64_t first = part.begin + int64_t{stretch} * kSumStretch;
    const int64_t end = part.end - first < kSumStretch ? part.end : first + kSumStretch;
    for (int64_t row = first; row < end; row += kRows) {
      const auto left = static_cast<int>(end - row);
      typename Columns::Words in = {}, x = {};
      DenseStatistics statistics[kRows] = {};
      Columns::Load(d.in, row * d.columns + column, d.columns, left, in);
      if (d.weight_sums != nullptr) {
        Columns::Load(d.x, row * d.columns + column, d.columns, left, x);
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          if (n >= left) break;
          statistics[n] = {ptx::LoadGlobalFloat(&d.statistics[row + n].mean),
                           ptx::LoadGlobalFloat(&d.statistics[row + n].rstd)};
        }
      }
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (n >= left) break;
        float numbers[Columns::kColumns], of_x[Columns::kColumns];
        Columns::Unpack(d.in, in[n], numbers);
        Columns::Unpack(d.x, x[n], of_x);
#pragma unroll
        for (int c = 0; c < Columns::kColumns; ++c) {
          const float number = RoundTo(d.operand, numbers[c]);
          sums[c].sum = ptx::Add(sums[c].sum, number);
          if (d.weight_sums == nullptr) continue;
          const float normalised = RoundTo(d.round_element, Normalised(statistics[n], of_x[c]));
          sums[c].weight_sum = ptx::Fma(number, normalised, sums[c].weight_sum);
        }
      }
    }
  }

  // Adds the part's stretches to `before`, in order.
  ATTN_HD static Sums SumOfStretches(const Part& part, int lane, Shared& shared, Sums before) {
#pragma unroll 8
    for (int n = 0; n < part.Stretches(); ++n) {
      before.sum = ptx::Add(before.sum, ptx::LoadSharedFloat(&shared.sums[n][lane]));
      before.weight_sum =
          ptx::Add(before.weight_sum, ptx::LoadSharedFloat(&shared.weight_sums[n][lane]));
    }
    return before;
  }

  // Adds the parts of a column by one warp; each part is a block of rows.
  ATTN_HD static void AddTogether(const ColumnSumsDesc& d, const Part& part, int column, int lane,
                                  Shared& shared) {
    const Sums own = SumOfStretches(part, lane, shared, Sums());
    const auto parts = static_cast<int>(SumParts(d));
    if (parts == 1) {
      if (column < d.columns && d.sums != nullptr) Add(d.sums + column, own.sum);
      if (column < d.columns && d.weight_sums != nullptr) {
        Add(d.weight_sums + column, own.weight_sum);
      }
      return;
    }
    if (column < d.columns) {
      float* place = d.carries + part.number * PartStride(d) + column;
      ptx::StoreGlobalFloat(place, own.sum);
      if (d.weight_sums != nullptr) ptx::StoreGlobalFloat(place + d.columns, own.weight_sum);
    }
    ptx::SyncWarp();
    const bool is_last = lane == 0 && ptx::AddAcquireRelease(d.turns + part.group, 1) == parts - 1;
    if (!ptx::VoteAny(is_last)) return;
    if (column < d.columns) {
      if (d.sums != nullptr) AddParts(d, parts, d.carries + column, d.sums + column);
      if (d.weight_sums != nullptr) {
        AddParts(d, parts, d.carries + d.columns + column, d.weight_sums + column);
      }
    }
    if (lane == 0) ptx::StoreRelease(d.turns + part.group, 0);
  }
  ATTN_HD static int64_t PartStride(const ColumnSumsDesc& d) {
    return int64_t{d.weight_sums != nullptr ? 2 : 1} * d.columns;
  }
  ATTN_HD static void AddParts(const ColumnSumsDesc& d, int parts, const float* from, float* to) {
    constexpr int kTogether = 8;
    const int64_t stride = PartStride(d);
    float sum = ptx::LoadGlobalFloat(to);
    for (int first = 0; first < parts; first += kTogether) {
      float of_part[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        of_part[n] = first + n < parts ? ptx::LoadGlobalFloat(from + (first + n) * stride) : 0;
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (first + n < parts) sum = ptx::Add(sum, of_part[n]);
      }
    }
    ptx::StoreGlobalFloat(to, sum);
  }

  // Adds a part by one warp, when its turn comes.
  ATTN_HD static void AddInTurn(const ColumnSumsDesc& d, const Part& part, int column, int lane,
                                Shared& shared) {
    if (part.number != 0) {
      if (lane == 0) {
        while (ptx::LoadAcquire(d.turns + part.group) != part.number) {
        }
      }
      ptx::SyncWarp();
    }
    if (column < d.columns) {
      Sums block;
      if (!part.begins_block) {
        block = {ptx::LoadGlobalFloat(d.carries + column),
                 ptx::LoadGlobalFloat(d.carries + d.columns + column)};
      }
      block = SumOfStretches(part, lane, shared, block);
      if (part.ends_block) {
        if (d.sums != nullptr) Add(d.sums + column, block.sum);
        if (d.weight_sums != nullptr) Add(d.weight_sums + column, block.weight_sum);
      } else {
        ptx::StoreGlobalFloat(d.carries + column, block.sum);
        ptx::StoreGlobalFloat(d.carries + d.columns + column, block.weight_sum);
      }
    }
    if (part.number == 0 && part.is_last) return;
    ptx::SyncWarp();
    if (lane == 0) ptx::StoreRelease(d.turns + part.group, part.is_last ? 0 : part.number + 1);
  }

  ATTN_HD static void Add(float* to, float sum) {
    ptx::StoreGlobalFloat(to, ptx::Add(ptx::LoadGlobalFloat(to), sum));
  }
};

}  // namespace attnd
