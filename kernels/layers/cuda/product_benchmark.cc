// How fast products of layers are on the GPU of this machine: TFLOP/s of y = x·Wᵀ, dx = dy·W and
// dW = xᵀ·dy of 16,384 rows, and of 512, which leave most of a large GPU idle but for small tiles.
// Usage: product_benchmark [float16|bfloat16|float32] [ROWS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/layers/cuda/cuda_device.h"

namespace attnd {
namespace {

constexpr int kRepeats = 5;

// The median, of one product of this many rows.
template <class Queue>
double SecondsOf(CudaDevice& device, int64_t rows, const Queue& queue) {
  const int together = rows > 1024 ? 10 : 200;
  std::vector<double> seconds;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < together; ++n) queue();
    CHECK(device.Finish().ok());
    const auto end = std::chrono::steady_clock::now();
    seconds.push_back(std::chrono::duration<double>(end - start).count() / together);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kRepeats / 2];
}

void Run(cuda::CudaBackend& engine, ElementType element, int64_t rows) {
  const int64_t size = ElementBytes(element);
  for (int64_t width : {768, 1024, 2048, 4096}) {
    for (int64_t times : {1, 3, 4}) {
      const int64_t to = times * width;
      CudaDevice device(engine);
      const int64_t x_bytes = rows * width * size, y_bytes = rows * to * size;
      const int64_t weight_bytes = width * to * 4;
      auto* x = device.Allocate(x_bytes + y_bytes + 2 * weight_bytes + device.OwnBytes()).value();
      auto *y = x + x_bytes, *weight = y + y_bytes, *sums = weight + weight_bytes;
      WeightProduct product{
          .rows = rows,
          .a = {x, element},
          .weight = {.weight = {weight, element}, .rows = to, .columns = width, .operand = element},
          .is_transposed = true,
          .c = {y, element}};
      const double flops =
          2e-12 * static_cast<double>(rows) * static_cast<double>(width) * static_cast<double>(to);
      const auto print = [&](double seconds) {
        std::printf(" %8.1f", flops / seconds);
        std::fflush(stdout);
      };
      std::printf("%6ld %6ld %6ld", static_cast<long>(rows), static_cast<long>(width),
                  static_cast<long>(to));
      print(SecondsOf(device, rows, [&] { device.Multiply(product); }));
      product.is_transposed = false;
      product.a = {y, element};
      product.c = {x, element};
      print(SecondsOf(device, rows, [&] { device.Multiply(product); }));
      const GradientProduct gradient{.rows = rows,
                                     .a = {y, element},
                                     .b = {x, element},
                                     .a_columns = to,
                                     .b_columns = width,
                                     .operand = element,
                                     .sums = reinterpret_cast<float*>(sums)};
      print(SecondsOf(device, rows, [&] { device.AddGradient(gradient); }));
      std::printf("\n");
    }
  }
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "float16";
  const auto element = name == "float32"    ? attnd::ElementType::kFloat32
                       : name == "bfloat16" ? attnd::ElementType::kBFloat16
                                            : attnd::ElementType::kFloat16;
  auto gpu = attnd::cuda::MakeDriverDevice({});
  CHECK(gpu.ok()) << gpu.status();
  attnd::cuda::CudaBackend engine(*std::move(gpu));
  std::printf("%s, %s, TFLOP/s\n%6s %6s %6s %8s %8s %8s\n", engine.device().info().device.c_str(),
              name.c_str(), "rows", "width", "to", "y", "dx", "dW");
  if (argc > 2) {
    attnd::Run(engine, element, std::stol(argv[2]));
    return 0;
  }
  for (int64_t rows : {512, 16384}) attnd::Run(engine, element, rows);
}
