// NormSumsKernel: NormKernel's gradient of float16 vectors, and on the way what the gradients of
// the norm's parameters are sums of (NormSumsDesc). A block has kSumStretch vectors, a warp one at
// a time, which it reads once and keeps in registers while its next one comes. What warps have read
// goes through shared memory to threads that sum columns over them. The equations, and the order of
// every sum, are those of NormKernel and ColumnSumsKernel.
// Errors: none.
#pragma once

#include "kernels/dense/listed_params.h"
#include "kernels/dense/norm.h"

namespace attnd::sm70 {

struct NormSumsKernel {
  static constexpr int kThreads = kNormThreads;
  static constexpr int kWarps = kThreads / 32;
  struct Shared {
    alignas(16) char x[kWarps][kNormSumsColumns * 2];
    alignas(16) char dy[kWarps][kNormSumsColumns * 2];
    alignas(16) char out[kWarps][kNormSumsColumns * 2];
    alignas(16) float factors[kNormSumsColumns];
    DenseStatistics statistics[kWarps];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const NormSumsDesc& d = *static_cast<const NormSumsDesc*>(params.dense);
    const Vectors vectors(d.norm, at.thread);
    const int warp = at.thread / 32;
    Sums sums = {};
    vectors.PutFactors(d.norm.weight, d.norm.weight_offset, at.thread, shared);
    ptx::SyncThreads();
#pragma unroll 1
    for (int n = 0; n < kSumStretch; n += kWarps) {
      vectors.Backward(at.block * kSumStretch + n + warp, warp, shared);
      ptx::SyncThreads();
      vectors.AddColumns(at.thread * kColumns, shared, sums);
      ptx::SyncThreads();
    }
    vectors.Leave(d, at, sums);
  }

 private:
  using How = WholeHalves<Float16>;
  static constexpr int kStep = 32 * kNeighbours, kGroups = kNormSumsColumns / kStep;
  static constexpr int kColumns = 4;  // of a thread that sums
  static_assert(kNormSumsColumns <= kThreads * kColumns);
  using Numbers = float[kNeighbours];
  struct Row {
    Numbers x[kGroups], dy[kGroups];
  };
  struct Sums {
    float of_dy[kColumns], of_weight[kColumns];
  };

  // Fields of the descriptor are read once: the compiler would read them anew behind every store.
  struct Vectors {
    DenseTensor x, dy, out;
    DenseStatistics* statistics;
    NormChain after;
    int column, count, round_element;
    float divisor, epsilon;
    bool is_centred, adds, stores_out;

    ATTN_HD Vectors(const NormDesc& d, int thread)
        : x(d.x),
          dy(d.dy),
          out(d.out),
          statistics(d.statistics),
          after(d.after),
          column(thread % 32 * kNeighbours),
          count(d.count),
          round_element(d.round_element),
          divisor(static_cast<float>(d.count)),
          epsilon(d.epsilon),
          is_centred(d.is_centred != 0),
          adds(d.add != 0) {
      const bool is_replaced = after.count > 0 && after.steps[after.count - 1].stores != 0 &&
                               after.steps[after.count - 1].out.data == out.data;
      stores_out = !is_replaced;
    }

    // Calls body(group, column) for each of the lane's groups that a vector has.
    template <class Body>
    ATTN_HD void ForEach(const Body& body) const {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        if (column + n * kStep < count) body(n, column + n * kStep);
      }
    }
    ATTN_HD int64_t Index(int row, int of_column) const { return int64_t{row} * count + of_column; }
    ATTN_HD void PutFactors(const DenseTensor& weight, float offset, int thread,
                            Shared& shared) const {
      for (int n = thread; n < count; n += kThreads) {
        const auto* const at = static_cast<const float*>(weight.data) + n;
        const float factor =
            weight.data == nullptr ? 1 : ptx::Add(ptx::LoadGlobalFloat(at), offset);
        ptx::StoreSharedFloat(&shared.factors[n], factor);
      }
    }
    ATTN_HD static void Factors(const Shared& shared, int of_column, Numbers& factors) {
#pragma unroll
      for (int i = 0; i < kNeighbours; i += 4) {
        const uint4 words = ptx::LoadShared128(&shared.factors[of_column + i]);
        factors[i] = ptx::BitsFloat(words.x), factors[i + 1] = ptx::BitsFloat(words.y);
        factors[i + 2] = ptx::BitsFloat(words.z), factors[i + 3] = ptx::BitsFloat(words.w);
      }
    }
    ATTN_HD void Fetch(int number, int warp, Shared& shared, Row& row) const {
      How::Raw of_x[kGroups], of_dy[kGroups];
      ForEach([&](int n, int of_column) {
        How::Fetch(x, Index(number, of_column), of_x[n]);
        How::Fetch(dy, Index(number, of_column), of_dy[n]);
      });
      ForEach([&](int n, int of_column) {
        ptx::StoreShared128(shared.x[warp] + of_column * 2, of_x[n]);
        ptx::StoreShared128(shared.dy[warp] + of_column * 2, of_dy[n]);
        Unpack<Float16>(of_x[n], row.x[n]);
        Unpack<Float16>(of_dy[n], row.dy[n]);
      });
    }
    ATTN_HD static float OverLanes(float sum) {
#pragma unroll
      for (int mask = 16; mask > 0; mask >>= 1) sum = ptx::Add(sum, ptx::ShuffleXor(sum, mask));
      return sum;
    }
    ATTN_HD DenseStatistics StatisticsOf(const Row& row) const {
      float mean = 0;
      if (is_centred) {
        float sum = 0;
        ForEach([&](int n, int) {
#pragma unroll
          for (int i = 0; i < kNeighbours; ++i) sum = ptx::Add(sum, row.x[n][i]);
        });
        mean = ptx::Divide(OverLanes(sum), divisor);
      }
      float squares = 0;
      ForEach([&](int n, int) {
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          const float away = ptx::Subtract(row.x[n][i], mean);
          squares = ptx::Fma(away, away, squares);
        }
      });
      const float variance = ptx::Divide(OverLanes(squares), divisor);
      return {mean, ptx::Divide(1, ptx::SquareRoot(ptx::Add(variance, epsilon)))};
    }

    ATTN_HD void Backward(int number, int warp, Shared& shared) const {
      Row row;
      Fetch(number, warp, shared, row);
      const DenseStatistics s = StatisticsOf(row);
      if (column == 0) {
        ptx::StoreGlobalFloat(&statistics[number].mean, s.mean);
        ptx::StoreGlobalFloat(&statistics[number].rstd, s.rstd);
        ptx::StoreShared64(&shared.statistics[warp],
                           make_uint2(ptx::FloatBits(s.mean), ptx::FloatBits(s.rstd)));
      }
      float sum = 0, along = 0;
      // From here on: what x is normalised to, and dn.
      ForEach([&](int n, int of_column) {
        Numbers factors;
        Factors(shared, of_column, factors);
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          row.dy[n][i] = ptx::Multiply(row.dy[n][i], factors[i]);
          row.x[n][i] = Normalised(s, row.x[n][i]);
          sum = ptx::Add(sum, row.dy[n][i]);
          along = ptx::Fma(row.dy[n][i], row.x[n][i], along);
        }
      });
      const float of_mean = is_centred ? ptx::Divide(OverLanes(sum), divisor) : 0;
      const float of_along = ptx::Divide(OverLanes(along), divisor);
      ForEach([&](int n, int of_column) {
        Numbers& dx = row.x[n];
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          const float less = ptx::Fma(-dx[i], of_along, ptx::Subtract(row.dy[n][i], of_mean));
          dx[i] = ptx::Multiply(less, s.rstd);
        }
        const int64_t index = Index(number, of_column);
        if (adds) {
          How::Raw there;
          How::Fetch(out, index, there);
          AddNeighbours<How>(there, out, index, kNeighbours, dx);
        }
        const How::Raw words = Packed<Float16>(dx);
        if (stores_out) ptx::StoreGlobal128(PlaceOf(out, index), words);
        ptx::StoreShared128(shared.out[warp] + of_column * 2, words);
      });
      if (after.count > 0) RunAfter(number, warp, shared);
    }
    // Each lane reads what it has stored.
    ATTN_HD void RunAfter(int number, int warp, const Shared& shared) const {
#pragma unroll 1
      for (int of_column = column; of_column < count; of_column += kStep) {
        const NeighboursPlace place = {static_cast<uint32_t>(number),
                                       static_cast<uint32_t>(of_column), kNeighbours};
        Numbers numbers;
        Unpack<Float16>(ptx::LoadShared128(shared.out[warp] + of_column * 2), numbers);
        RunChain<How>(after.steps, after.count, place, Index(number, of_column), numbers);
      }
    }

    ATTN_HD void AddColumns(int first, const Shared& shared, Sums& sums) const {
      if (first >= count) return;
#pragma unroll 2
      for (int n = 0; n < kWarps; ++n) {
        const uint2 of_x = ptx::LoadShared64(shared.x[n] + first * 2);
        const uint2 of_dy = ptx::LoadShared64(shared.dy[n] + first * 2);
        const uint2 of = ptx::LoadShared64(&shared.statistics[n]);
        const DenseStatistics s = {ptx::BitsFloat(of.x), ptx::BitsFloat(of.y)};
        const float xs[] = {Float16::Low(of_x.x), Float16::High(of_x.x), Float16::Low(of_x.y),
                            Float16::High(of_x.y)};
        const float dys[] = {Float16::Low(of_dy.x), Float16::High(of_dy.x), Float16::Low(of_dy.y),
                             Float16::High(of_dy.y)};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const float normalised = RoundTo(round_element, Normalised(s, xs[i]));
          sums.of_dy[i] = ptx::Add(sums.of_dy[i], dys[i]);
          sums.of_weight[i] = ptx::Fma(dys[i], normalised, sums.of_weight[i]);
        }
      }
    }
    ATTN_HD void Leave(const NormSumsDesc& d, ThreadIndex at, const Sums& sums) const {
      const int first = at.thread * kColumns;
      if (first >= count) return;
      const int64_t index = int64_t{at.block} * count + first;
      const auto words = [](const float(&of)[kColumns]) {
        return make_uint4(ptx::FloatBits(of[0]), ptx::FloatBits(of[1]), ptx::FloatBits(of[2]),
                          ptx::FloatBits(of[3]));
      };
      ptx::StoreGlobal128(d.sums + index, words(sums.of_dy));
      ptx::StoreGlobal128(d.weight_sums + index, words(sums.of_weight));
    }
  };
};

// Adds what those blocks leave to the gradients of the parameters (StretchSumsDesc): a block has 32
// columns of one of them, a warp some blocks of stretches.
struct StretchSumsKernel {
  static constexpr int kThreads = 512, kWarps = kThreads / 32;
  struct Shared {
    float sums[kMostStretchBlocks][32];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const StretchSumsDesc d = *static_cast<const StretchSumsDesc*>(params.dense);  // read at once
    const int groups = (d.count + 31) / 32, lane = at.thread % 32, warp = at.thread / 32;
    const bool of_weight = at.block >= groups;
    const int column = (of_weight ? at.block - groups : at.block) * 32 + lane;
    const bool is_there = column < d.count;
    const float* const from = (of_weight ? d.weight_sums : d.sums) + column;
    float* const to = (of_weight ? d.to_weight : d.to) + column;
    const int blocks = (d.stretches + kStretchesOfBlock - 1) / kStretchesOfBlock;
    for (int block = warp; block < blocks && is_there; block += kWarps) {
      ptx::StoreSharedFloat(&shared.sums[block][lane], SumOf(d, from, block * kStretchesOfBlock));
    }
    ptx::SyncThreads();
    if (warp != 0 || !is_there) return;
    float sum = ptx::LoadGlobalFloat(to);
    for (int block = 0; block < blocks; ++block) {
      sum = ptx::Add(sum, ptx::LoadSharedFloat(&shared.sums[block][lane]));
    }
    ptx::StoreGlobalFloat(to, sum);
  }

 private:
  // All loads wait together.
  ATTN_HD static float SumOf(const StretchSumsDesc& d, const float* from, int first) {
    float of[kStretchesOfBlock];
#pragma unroll
    for (int n = 0; n < kStretchesOfBlock; ++n) {
      if (first + n < d.stretches)
        of[n] = ptx::LoadGlobalFloat(from + int64_t{first + n} * d.count);
    }
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kStretchesOfBlock; ++n) {
      if (first + n < d.stretches) sum = ptx::Add(sum, of[n]);
    }
    return sum;
  }
};

}  // namespace attnd::sm70
