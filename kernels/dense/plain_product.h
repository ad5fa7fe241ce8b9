// PlainProductKernel: C = A·B on no tensor core (PlainProductDesc): any element, shape and
// alignment, 64 × 64 numbers of C a block, 4 × 4 a thread. Each number of C is one chain of float32
// multiply-adds over ascending depth (with kProductAddBlocks one for each kProductBlockDepth), so
// its bits depend on its row of A, its column of B and the depth alone.
#pragma once

#include "kernels/dense/elements.h"

namespace attnd {

struct PlainProductKernel {
  static constexpr int kThreads = 256, kOwn = 4, kPitch = kPlainTile + 4;
  struct Shared {
    alignas(16) float a[kPlainDepth][kPitch];
    alignas(16) float b[kPlainDepth][kPitch];
  };
  static_assert(kThreads * kOwn * kOwn == kPlainTile * kPlainTile);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const PlainProductDesc d = *static_cast<const PlainProductDesc*>(params.dense);
    const ProductDesc& p = d.product;
    const int column_tiles = (p.columns + kPlainTile - 1) / kPlainTile;
    const Block block = {d, at.block / column_tiles * kPlainTile,
                         at.block % column_tiles * kPlainTile, at.thread};
    const int step = p.result == kProductAddBlocks ? kProductBlockDepth : p.depth;
    int begin = 0;
    do {
      const int end = p.depth - begin < step ? p.depth : begin + step;
      Sums sums = {};
      Held held;
      Fetch(block, begin, end, held);
      for (int k = begin; k < end; k += kPlainDepth) {
        Put(block, held, shared);
        ptx::SyncThreads();
        Fetch(block, k + kPlainDepth, end, held);
        Multiply(block, shared, sums);
        ptx::SyncThreads();
      }
      Finish(block, sums);
      begin = end;
    } while (begin < p.depth);
  }

 private:
  struct Block {
    const PlainProductDesc& desc;  // a copy, in registers
    int row, column;               // of C, the first
    int thread;
    ATTN_HD int own_row() const { return thread / (kPlainTile / kOwn) * kOwn; }
    ATTN_HD int own_column() const { return thread % (kPlainTile / kOwn) * kOwn; }
  };
  struct Sums {
    float of[kOwn][kOwn];
  };
  // One of the operands: `first` is its first row (column) of C.
  struct Operand {
    const void* data;
    int32_t element;
    int64_t stride;
    bool by_depth;
    int first, size;
  };

  // A thread's numbers of the next step, on their way.
  static constexpr int kOwnOfStep = kPlainTile * kPlainDepth / kThreads;
  struct Held {
    float a[kOwnOfStep], b[kOwnOfStep];
  };
  // Neighbouring threads read neighbours in memory.
  struct Place {
    int row, depth;
    ATTN_HD Place(bool by_depth, int n)
        : row(by_depth ? n % kPlainTile : n / kPlainDepth),
          depth(by_depth ? n / kPlainTile : n % kPlainDepth) {}
  };

  ATTN_HD static void Fetch(const Block& block, int k, int end, Held& held) {
    const PlainProductDesc& d = block.desc;
    const ProductDesc& p = d.product;
    FetchOne(block, {p.a, d.a_element, p.a_stride, d.a_by_depth != 0, block.row, p.rows}, k, end,
             held.a);
    FetchOne(block, {p.b, d.b_element, p.b_stride, d.b_by_depth != 0, block.column, p.columns}, k,
             end, held.b);
  }
  ATTN_HD static void FetchOne(const Block& block, const Operand& from, int k, int end,
                               float (&held)[kOwnOfStep]) {
#pragma unroll
    for (int n = 0; n < kOwnOfStep; ++n) {
      const Place place(from.by_depth, block.thread + n * kThreads);
      const int64_t row = from.first + place.row, at = k + place.depth;
      held[n] = 0;
      if (row < from.size && at < end) {
        const int64_t index = from.by_depth ? at * from.stride + row : row * from.stride + at;
        held[n] = LoadNumber(from.data, from.element, index);
      }
    }
  }
  ATTN_HD static void Put(const Block& block, const Held& held, Shared& shared) {
    const PlainProductDesc& d = block.desc;
#pragma unroll
    for (int n = 0; n < kOwnOfStep; ++n) {
      const Place a(d.a_by_depth != 0, block.thread + n * kThreads);
      const Place b(d.b_by_depth != 0, block.thread + n * kThreads);
      ptx::StoreSharedFloat(&shared.a[a.depth][a.row], RoundTo(d.operand, held.a[n]));
      ptx::StoreSharedFloat(&shared.b[b.depth][b.row], RoundTo(d.operand, held.b[n]));
    }
  }

  // Zeros beyond the depth change no sum but −0.
  ATTN_HD static void Multiply(const Block& block, const Shared& shared, Sums& sums) {
#pragma unroll
    for (int k = 0; k < kPlainDepth; ++k) {
      const uint4 a = ptx::LoadShared128(&shared.a[k][block.own_row()]);
      const uint4 b = ptx::LoadShared128(&shared.b[k][block.own_column()]);
      const float rows[] = {ptx::BitsFloat(a.x), ptx::BitsFloat(a.y), ptx::BitsFloat(a.z),
                            ptx::BitsFloat(a.w)};
      const float columns[] = {ptx::BitsFloat(b.x), ptx::BitsFloat(b.y), ptx::BitsFloat(b.z),
                               ptx::BitsFloat(b.w)};
#pragma unroll
      for (int m = 0; m < kOwn; ++m) {
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          sums.of[m][n] = ptx::Fma(rows[m], columns[n], sums.of[m][n]);
        }
      }
    }
  }

  ATTN_HD static void Finish(const Block& block, const Sums& sums) {
    const ProductDesc& p = block.desc.product;
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
      const int row = block.row + block.own_row() + m;
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int column = block.column + block.own_column() + n;
        if (row >= p.rows || column >= p.columns) continue;
        float sum = sums.of[m][n];
        if (p.bias != nullptr) sum = ptx::Add(sum, LoadNumber(p.bias, p.bias_element, column));
        StoreOrAdd(p.c, p.c_element, row * p.c_stride + column, sum, p.result != kProductStore);
      }
    }
  }
};

}  // namespace attnd
