// The rate of dense products for the shapes of a transformer's layer, in one thread and in two, by
// seconds of processors, so that it can be read on a busy machine:
//     bazel run -c opt //kernels/cpu/dense:dense_benchmark
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "kernels/cpu/dense/dense_product.h"

namespace attnd {
namespace {

struct Shape {
  const char* name;
  DenseOrder a, b;
  DenseResult result;
  int64_t rows, columns, depth;
};

double ProcessorSecondsOf(const DenseProduct& product, ThreadPool& pool,
                          std::vector<float>& scratch) {
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const std::clock_t start = std::clock();
    pool.ParallelFor(DenseItems(product), [&](int64_t item, int thread) {
      RunDenseItem(product, item, &scratch[thread * kDenseScratchFloats]);
    });
    best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best;
}

void Report(const Shape& s, ElementType element, int threads) {
  ThreadPool pool(threads);
  std::vector<float> scratch(threads * kDenseScratchFloats);
  const std::vector<float> a(s.rows * s.depth), b(PackedElements(s.columns, s.depth));
  std::vector<float> c(s.rows * s.columns);
  DenseProduct p{.rows = s.rows, .columns = s.columns, .depth = s.depth, .operand = element};
  p.a = {a.data(), element, s.a == DenseOrder::kRows ? s.depth : s.rows};
  p.b = {b.data(), element, s.columns};
  p.a_order = s.a, p.b_order = s.b, p.result = s.result;
  p.c = c.data();
  const double flops = 2.0 * s.rows * s.columns * s.depth;
  std::printf("%-16s %5ld x %5ld x %5ld, %s, %d threads: %6.1f GFLOP/s a processor\n", s.name,
              s.rows, s.columns, s.depth, std::string(ElementName(element)).c_str(), threads,
              flops / ProcessorSecondsOf(p, pool, scratch) * 1e-9);
}

}  // namespace
}  // namespace attnd

int main() {
  using namespace attnd;  // NOLINT
  for (int64_t width : {768, 1024}) {
    const Shape shapes[] = {
        {"values", DenseOrder::kRows, DenseOrder::kPanels, DenseResult::kStore, 2048, 4 * width,
         width},
        {"input gradient", DenseOrder::kRows, DenseOrder::kDepth, DenseResult::kStore, 2048, width,
         4 * width},
        {"weight gradient", DenseOrder::kDepth, DenseOrder::kDepth, DenseResult::kAddBlocks,
         4 * width, width, 2048},
    };
    for (const Shape& shape : shapes) {
      for (ElementType element : {ElementType::kFloat32, ElementType::kBFloat16}) {
        for (int threads : {1, 2}) Report(shape, element, threads);
      }
    }
  }
  return 0;
}
