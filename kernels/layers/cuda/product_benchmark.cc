// How fast products of layers are on the GPU of this machine: TFLOP/s of y = x·Wᵀ, dx = dy·W and
// dW = xᵀ·dy of 16,384 rows, and of 512, which leave most of a large GPU idle but for small tiles.
// Usage: product_benchmark [float16|bfloat16|float32] [ROWS]
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
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

// TEMPORARY: dW of every kernel and cut, and whether its bits are the old kernel's.
struct Way {
  const char* name;
  ForcedGradient forced;
};
constexpr Way kWays[] = {
    {"old128", {1, -1}}, {"192s3", {0, -1}},   {"192s3k1", {0, 1}}, {"192s3k2", {0, 2}},
    {"192s3k4", {0, 4}}, {"192whole", {0, 0}}, {"192s1", {2, -1}},  {"192s1k1", {2, 1}},
    {"128s2", {3, -1}},  {"128s2k1", {3, 1}},  {"128whole", {3, 0}}, {"128s1", {4, -1}},  {"192pair", {5, -1}}, {"192pwhole", {5, 0}},
    {"192pk1", {5, 1}},  {"128pair", {6, -1}},
    {"chosen", {-1, -1}}};

std::atomic<int64_t> progress{0};
std::atomic<const char*> at_work{"start"};

void Watch() {
  int64_t last = -1;
  for (int seconds = 0;; ++seconds) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    if (progress != last) {
      last = progress;
      seconds = 0;
    }
    if (seconds < 20) continue;
    std::printf("\nHANGS: %s\n", at_work.load());
    std::fflush(stdout);
    _exit(3);
  }
}

// Random halves in [-1, 1), or floats, repeated.
void Fill(CudaDevice& device, std::byte* to, int64_t bytes, bool halves) {
  static const std::vector<uint16_t>& words = *[] {
    auto* all = new std::vector<uint16_t>(1 << 22);
    std::mt19937 random(7);
    for (uint16_t& word : *all) {
      word = static_cast<uint16_t>((random() & 1) << 15 | (0x2c00 + random() % 0x1000));
    }
    return all;
  }();
  // As floats these are of sizes 2^-80 or so to 2^-20, which every rounding shows.
  const int64_t most = std::min<int64_t>(bytes, static_cast<int64_t>(words.size()) * 2);
  const ElementType element = halves ? ElementType::kFloat16 : ElementType::kFloat32;
  const int64_t size = ElementBytes(element);
  CHECK(device.Put(element, words.data(), {to, element}, most / size).ok());
  CHECK(device.Finish().ok());
  for (int64_t done = most; done < bytes; done *= 2) {
    device.Copy(to, to + done, std::min(done, bytes - done));
  }
  CHECK(device.Finish().ok());
}

void RunWays(cuda::CudaBackend& engine, int64_t rows, absl::Span<const int64_t> widths) {
  const ElementType element = ElementType::kFloat16;
  std::printf("%6s %6s %6s", "rows", "width", "to");
  for (const Way& way : kWays) std::printf(" %9s", way.name);
  std::printf("\n");
  for (int64_t width : widths) {
    for (int64_t times : {1, 3, 4}) {
      const int64_t to = times * width;
      CudaDevice device(engine);
      const int64_t x_bytes = rows * width * 2, y_bytes = rows * to * 2, c_bytes = width * to * 4;
      auto* x = device.Allocate(x_bytes + y_bytes + c_bytes + device.OwnBytes()).value();
      auto *y = x + x_bytes, *c = y + y_bytes;
      ++progress;
      Fill(device, x, x_bytes, true);
      Fill(device, y, y_bytes, true);
      const GradientProduct gradient{.rows = rows,
                                     .a = {y, element},
                                     .b = {x, element},
                                     .a_columns = to,
                                     .b_columns = width,
                                     .operand = element,
                                     .sums = reinterpret_cast<float*>(c)};
      const double flops =
          2e-12 * static_cast<double>(rows) * static_cast<double>(width) * static_cast<double>(to);
      std::printf("%6ld %6ld %6ld", static_cast<long>(rows), static_cast<long>(width),
                  static_cast<long>(to));
      std::fflush(stdout);
      std::vector<float> old, got(static_cast<size_t>(width * to));
      std::string wrong;
      for (const Way& way : kWays) {
        at_work = way.name;
        ++progress;
        forced_gradient = way.forced;
        Fill(device, c, c_bytes, false);
        device.AddGradient(gradient);
        CHECK(device.Get({c, ElementType::kFloat32}, ElementType::kFloat32, got.data(), width * to)
                  .ok());
        ++progress;
        if (old.empty()) {
          old = got;
        } else if (std::memcmp(old.data(), got.data(), old.size() * 4) != 0) {
          size_t count = 0, first = old.size();
          for (size_t n = 0; n < old.size(); ++n) {
            if (std::memcmp(&old[n], &got[n], 4) == 0) continue;
            ++count;
            first = std::min(first, n);
          }
          wrong += std::string("  BITS DIFFER: ") + way.name + ", " + std::to_string(count) +
                   " numbers, first at row " + std::to_string(first / width) + " column " +
                   std::to_string(first % width) + "\n";
        }
        const double seconds = SecondsOf(device, rows, [&] { device.AddGradient(gradient); });
        ++progress;
        std::printf(" %9.1f", flops / seconds);
        std::fflush(stdout);
      }
      std::printf("\n%s", wrong.c_str());
      std::fflush(stdout);
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
  if (name == "variants") {
    std::thread(attnd::Watch).detach();
    std::printf("%s, %d multiprocessors, kernel loads follow\n",
                engine.device().info().device.c_str(), engine.device().multiprocessors());
    attnd::RunWays(engine, 16384, {768, 1024, 2048, 4096});
    attnd::RunWays(engine, 512, {768, 1024, 2048, 4096});
    attnd::RunWays(engine, 4096, {768, 1024, 2048, 4096});
    std::_Exit(0);
  }
  std::printf("%s, %s, TFLOP/s\n%6s %6s %6s %8s %8s %8s\n", engine.device().info().device.c_str(),
              name.c_str(), "rows", "width", "to", "y", "dx", "dW");
  if (argc > 2) {
    attnd::Run(engine, element, std::stol(argv[2]));
    return 0;
  }
  for (int64_t rows : {512, 16384}) attnd::Run(engine, element, rows);
}
