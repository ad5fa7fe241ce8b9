// capture_sums.h: the results of a captured attention map, from a tile whose sums over heads
// capture_map.h has made: the average over all heads, the sums of its blocks and its moments in
// float64, and the map itself if it is kept. Errors: none.
#pragma once

#include "attention/score_rule.h"
#include "kernels/rules/descriptors.h"

namespace attnd {

// One block for one tile of the map.
struct CaptureSumsKernel {
  static constexpr int kThreads = 256;
  static constexpr int kMaxKeys = 128;
  static constexpr int kCellColumns = 16;  // of blocks, at a time
  struct Shared {
    double parts[kCaptureRows * kCellColumns];  // a row's sum of each block
    double moments[3][kThreads];
    float map[kCaptureRows * (kMaxKeys + 1)];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork& tile = params.tiles[at.block];
    const CaptureDesc& c = *params.capture;
    const int row = tile.tile / c.key_tiles * kCaptureRows;
    const int key = tile.tile % c.key_tiles * c.tile_keys;
    const Work work = {c,
                       row,
                       key,
                       MinInt(kCaptureRows, c.rows - row),
                       MinInt(c.tile_keys, c.keys - key),
                       c.tile_keys + 1,
                       at.thread};
    Average(work, c.sums + int64_t{tile.head} * (kCaptureRows * c.tile_keys), shared);
    ptx::SyncThreads();
    SumMoments(work, c.moments + int64_t{tile.tile} * 3, shared);
    SumCells(work, c.cells + tile.batch, shared);
  }

 private:
  struct Work {
    const CaptureDesc& capture;
    int row, key;    // the tile's first
    int rows, keys;  // of it that exist
    int pitch;       // of rows in shared memory
    int thread;
  };
  static constexpr int kTogether = 8;  // a thread's entries whose loads are under way at once

  // The tile's entries, a column a lane, to shared memory and the map; this thread's moments.
  ATTN_HD static void Average(const Work& work, const float* sums, Shared& shared) {
    const CaptureDesc& c = work.capture;
    const int entries = kCaptureRows * c.tile_keys;
    double first = 0, second = 0, third = 0;
    for (int n = work.thread; n < entries; n += kTogether * kThreads) {
      float total[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) total[i] = 0;
      for (int split = 0; split < c.splits; ++split) {
        const float* from = sums + int64_t{split} * entries + n;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) total[i] += ptx::LoadGlobalFloat(from + i * kThreads);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = (n + i * kThreads) / c.tile_keys, key = (n + i * kThreads) % c.tile_keys;
        if (row >= work.rows || key >= work.keys) continue;
        const float average = total[i] * c.share;
        ptx::StoreSharedFloat(&shared.map[row * work.pitch + key], average);
        if (c.map != nullptr) {
          ptx::StoreGlobalFloat(c.map + int64_t{work.row + row} * c.keys + work.key + key, average);
        }
        const double distance = average - c.origin;
        first += distance;
        second += distance * distance;
        third += distance * distance * distance;
      }
    }
    ptx::StoreSharedDouble(&shared.moments[0][work.thread], first);
    ptx::StoreSharedDouble(&shared.moments[1][work.thread], second);
    ptx::StoreSharedDouble(&shared.moments[2][work.thread], third);
  }
  ATTN_HD static void SumMoments(const Work& work, double* to, Shared& shared) {
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (work.thread < half) {
        for (int n = 0; n < 3; ++n) {
          double* at = &shared.moments[n][work.thread];
          ptx::StoreSharedDouble(at, ptx::LoadSharedDouble(at) + ptx::LoadSharedDouble(at + half));
        }
      }
      ptx::SyncThreads();
    }
    if (work.thread < 3) {
      ptx::StoreGlobalDouble(to + work.thread, ptx::LoadSharedDouble(shared.moments[work.thread]));
    }
  }

  // Sums the tile's part of each block that it meets: rows of blocks, kCellColumns at a time.
  ATTN_HD static void SumCells(const Work& work, double* to, Shared& shared) {
    const int block = work.capture.block;
    const int first_row = work.row / block, first_key = work.key / block;
    const int row_cells = (work.row + work.rows - 1) / block - first_row + 1;
    const int key_cells = (work.key + work.keys - 1) / block - first_key + 1;
    for (int column = 0; column < key_cells; column += kCellColumns) {
      const int columns = MinInt(kCellColumns, key_cells - column);
      for (int n = work.thread; n < work.rows * columns; n += kThreads) {
        const int row = n % work.rows, cell = first_key + column + n / work.rows;
        const int begin = MaxInt(cell * block - work.key, 0);
        const int end = MinInt((cell + 1) * block - work.key, work.keys);
        double sum = 0;
        for (int key = begin; key < end; ++key) {
          sum += ptx::LoadSharedFloat(&shared.map[row * work.pitch + key]);
        }
        ptx::StoreSharedDouble(&shared.parts[row * kCellColumns + n / work.rows], sum);
      }
      ptx::SyncThreads();
      for (int n = work.thread; n < row_cells * columns; n += kThreads) {
        const int cell = first_row + n / columns;
        const int begin = MaxInt(cell * block - work.row, 0);
        const int end = MinInt((cell + 1) * block - work.row, work.rows);
        double sum = 0;
        for (int row = begin; row < end; ++row) {
          sum += ptx::LoadSharedDouble(&shared.parts[row * kCellColumns + n % columns]);
        }
        ptx::StoreGlobalDouble(to + int64_t{n / columns} * key_cells + column + n % columns, sum);
      }
      ptx::SyncThreads();
    }
  }
};

}  // namespace attnd
