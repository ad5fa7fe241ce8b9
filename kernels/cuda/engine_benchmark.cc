// engine_benchmark: how well the cuda engine keeps a GPU and its link busy. Kernels are replaced by
// a spin of the time that a V100 would take (modelled, see SpinSeconds), because on a newer GPU the
// sm70 kernels run slowly and would hide everything else; transfers, memory, streams, batching and
// waiting are the product's own.
//
//   engine_benchmark [--devices N | --trap]
//
// --trap instead: a kernel traps while several launches are at work, and each must end with
// IsDeviceLost; prints how soon. The process is of no use afterwards.
// Prints, for one GPU and then for N: overlap (ideal time of a load over its real time, where ideal
// is the slower of link and kernel), batching (64 small calls in launches of 64 over one by one),
// the engine's latency over a bare copy, kernel and copy, and the throughput of N GPUs over one.
// Needs libcuda; figures in docs/PERFORMANCE.md.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "attention/cost.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/cuda/driver/handles.h"
#include "kernels/cuda/driver/memory_pool.h"

namespace attnd::cuda {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Spins for a number of nanoseconds. As PTX, so that the driver makes it for the GPU at hand.
constexpr char kSpinPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 nanoseconds) {
  .reg .u64 %begin, %now, %passed, %wanted;
  .reg .pred %again;
  ld.param.u64 %wanted, [nanoseconds];
  mov.u64 %begin, %globaltimer;
WAIT:
  mov.u64 %now, %globaltimer;
  sub.u64 %passed, %now, %begin;
  setp.lt.u64 %again, %passed, %wanted;
  @%again bra WAIT;
  ret;
})";

// Loses the device as an illegal instruction does.
constexpr char kTrapPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 nanoseconds) {
  trap;
})";

// A V100's 80 multiprocessors reach 55 % of 1.56 TFLOP/s each (tools/voltasim's range is 53 to
// 66 %); a launch costs 3 us. Whole waves of blocks.
double SpinSeconds(const KernelStep& step, int64_t keys) {
  if (step.row.kind != KernelKind::kForward) return 3e-6;
  const Tile& tile = step.row.tile;
  const double flops = 4.0 * tile.q_rows * static_cast<double>(keys) * tile.head_dim;
  const int at_once = 80 * tile.blocks_per_sm;
  const int waves = (step.params.tile_count + at_once - 1) / at_once;
  return 3e-6 + waves * tile.blocks_per_sm * flops / (0.55 * 1.56e12);
}

// The spin (or trap) kernel of one device, loaded at first use.
class Spin {
 public:
  explicit Spin(const char* ptx = kSpinPtx) : ptx_(ptx) {}
  absl::Status Enqueue(const Driver& driver, StreamRef stream, double seconds) {
    std::call_once(loaded_, [&] {
      module_ = std::make_unique<Module>(*Module::Load(driver, ptx_));
      function_ = *module_->Function("spin");
    });
    uint64_t nanoseconds = static_cast<uint64_t>(seconds * 1e9);
    void* arguments[] = {&nanoseconds};
    return stream.Launch(function_, {.blocks = 1, .threads = 32}, arguments);
  }
  void Unload() { module_.reset(); }

 private:
  const char* const ptx_;
  std::once_flag loaded_;
  std::unique_ptr<Module> module_;
  CUfunction function_ = nullptr;
};

Problem Heads(int64_t length, int64_t head_dim, int64_t heads) {
  Problem p = PlainProblem(1, heads, length, head_dim);
  p.element = ElementType::kFloat16;
  return p;
}

// A GPU with its engine; keys is what SpinSeconds needs to know of the load at hand.
struct Gpu {
  explicit Gpu(int ordinal, const char* ptx = kSpinPtx) : spin(std::make_unique<Spin>(ptx)) {
    auto device =
        MakeDriverDevice({.ordinal = ordinal,
                          .memory_fraction = 0.2,
                          .stand_in = [this](const Driver& driver, StreamRef stream,
                                             const KernelStep& step) -> absl::StatusOr<bool> {
                            const absl::Status status =
                                spin->Enqueue(driver, stream, SpinSeconds(step, keys));
                            if (!status.ok()) return status;
                            return true;
                          }});
    CHECK(device.ok()) << device.status();
    engine = std::make_unique<CudaBackend>(*std::move(device));
  }
  std::atomic<int64_t> keys{0};
  std::unique_ptr<Spin> spin;
  std::unique_ptr<CudaBackend> engine;
};

// One call's tensors in page-locked memory, inputs and outputs each without gaps.
class CallMemory {
 public:
  CallMemory(Gpu& gpu, const Problem& p, int calls) : gpu_(gpu) {
    const PayloadBytes bytes = BytesOf(p, Direction::kForward);
    const int64_t stride = (bytes.input + bytes.output + 63) / 64 * 64;
    bytes_ = stride * calls;
    data_ = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes_ + 4095) / 4096 * 4096));
    std::memset(data_, 0, bytes_);
    CHECK(gpu.engine->RegisterHost(absl::MakeSpan(data_, bytes_)).ok());
    for (int n = 0; n < calls; ++n) {
      std::byte* at = data_ + n * stride;
      ForwardCall call;
      call.problem = &p;
      call.k = at;
      call.v = at + p.KeyElements() * 2;
      call.q = at + (p.KeyElements() + p.ValueElements()) * 2;
      call.lse = reinterpret_cast<float*>(at + bytes.input);
      call.o = at + bytes.input + p.LseElements() * 4;
      calls_.push_back(call);
    }
  }
  ~CallMemory() {
    gpu_.engine->UnregisterHost(absl::MakeSpan(data_, bytes_));
    std::free(data_);
  }
  absl::Span<const ForwardCall> calls() const { return calls_; }

 private:
  Gpu& gpu_;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<ForwardCall> calls_;
};

// Bytes per second of both directions at once, by the driver alone.
struct Link {
  double up = 0, down = 0;
};
Link MeasureLink() {
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int kCopies = 20;
  auto driver = Driver::Load();
  CHECK(driver.ok());
  auto context = Context::Retain(**driver, 0);
  auto up = Stream::Create(**driver), down = Stream::Create(**driver);
  auto pool = MemoryPool::Create(**driver, 0, 2 * kBytes, up->ref());
  CHECK(pool.ok()) << pool.status();
  auto a = pool->Allocate(up->ref(), kBytes), b = pool->Allocate(up->ref(), kBytes);
  auto from = PinnedMemory::Allocate(**driver, kBytes),
       to = PinnedMemory::Allocate(**driver, kBytes);
  Event events[4];
  for (Event& event : events) event = *Event::Create(**driver, true);
  for (int round = 0; round < 2; ++round) {  // the first warms up
    CHECK(up->ref().Record(events[0]).ok() && down->ref().Record(events[1]).ok());
    for (int n = 0; n < kCopies; ++n) {
      CHECK(up->ref().CopyIn(a->address(), from->bytes().data(), kBytes).ok());
      CHECK(down->ref().CopyOut(to->bytes().data(), b->address(), kBytes).ok());
    }
    CHECK(up->ref().Record(events[2]).ok() && down->ref().Record(events[3]).ok());
    CHECK(up->ref().Synchronize().ok() && down->ref().Synchronize().ok());
  }
  return {kCopies * kBytes / *events[2].SecondsSince(events[0]),
          kCopies * kBytes / *events[3].SecondsSince(events[1])};
}

struct LoadResult {
  double wall = 0, kernel = 0;
  int64_t calls = 0;
};

// `threads` callers of one GPU, each with launches of `batch` calls, for `seconds`.
LoadResult RunLoad(Gpu& gpu, const Problem& p, int threads, int batch, double seconds) {
  gpu.keys = p.kv_len;
  std::vector<std::unique_ptr<CallMemory>> memory;
  for (int n = 0; n < threads; ++n) memory.push_back(std::make_unique<CallMemory>(gpu, p, batch));
  CHECK(gpu.engine->Forward(memory[0]->calls()).ok());
  const double kernel_before = gpu.engine->Use().kernel_seconds;
  std::atomic<int64_t> launches{0};
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> callers;
  for (int n = 0; n < threads; ++n) {
    callers.emplace_back([&, n] {
      while (SecondsSince(begin) < seconds) {
        auto report = gpu.engine->Forward(memory[n]->calls());
        CHECK(report.ok()) << report.status();
        ++launches;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return {SecondsSince(begin), gpu.engine->Use().kernel_seconds - kernel_before, launches * batch};
}

void ReportOverlap(Gpu& gpu, const Link& link) {
  std::printf("link, both directions at once: up %.1f GB/s, down %.1f GB/s\n", link.up / 1e9,
              link.down / 1e9);
  std::printf("%-34s %9s %9s %9s %9s %8s\n", "overlap: forward f16", "calls/s", "link %",
              "kernel %", "of ideal", "GB/s up");
  struct Row {
    int64_t length, head_dim, heads;
    int batch;
  };
  for (const Row& row : {Row{512, 64, 16, 4}, Row{1024, 64, 16, 1}, Row{2048, 128, 8, 1},
                         Row{4096, 64, 4, 1}, Row{4096, 128, 8, 1}, Row{8192, 128, 8, 1}}) {
    const Problem p = Heads(row.length, row.head_dim, row.heads);
    const LoadResult load = RunLoad(gpu, p, 4, row.batch, 2.0);
    const PayloadBytes bytes = BytesOf(p, Direction::kForward);
    const double calls = static_cast<double>(load.calls);
    const double link_seconds = std::max(calls * static_cast<double>(bytes.input) / link.up,
                                         calls * static_cast<double>(bytes.output) / link.down);
    const std::string name =
        "N=" + std::to_string(row.length) + " D=" + std::to_string(row.head_dim) +
        " H=" + std::to_string(row.heads) + " batch " + std::to_string(row.batch);
    std::printf("%-34s %9.0f %9.1f %9.1f %8.1f%% %8.1f\n", name.c_str(), calls / load.wall,
                100 * link_seconds / load.wall, 100 * load.kernel / load.wall,
                100 * std::max(link_seconds, load.kernel) / load.wall,
                calls * static_cast<double>(bytes.input) / load.wall / 1e9);
  }
}

void ReportBatching(Gpu& gpu) {
  const Problem p = Heads(256, 64, 4);
  const LoadResult alone = RunLoad(gpu, p, 1, 1, 2.0);
  std::printf("batching: N=256 D=64 H=4, one by one %.0f calls/s\n",
              static_cast<double>(alone.calls) / alone.wall);
  for (int batch : {8, 16, 32, 64}) {
    const LoadResult load = RunLoad(gpu, p, 64 / batch < 4 ? 64 / batch + 1 : 4, batch, 2.0);
    std::printf("  launches of %2d: %.0f calls/s, %.1f times one by one\n", batch,
                static_cast<double>(load.calls) / load.wall,
                static_cast<double>(load.calls) / load.wall /
                    (static_cast<double>(alone.calls) / alone.wall));
  }
}

std::vector<double> Sorted(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values;
}

constexpr int kLatencyCalls = 5000;

// One copy, one spin, one copy, by the driver alone, waited for by polling.
std::vector<double> BareLatencies(const Problem& p) {
  const PayloadBytes bytes = BytesOf(p, Direction::kForward);
  auto driver = Driver::Load();
  auto context = Context::Retain(**driver, 0);
  auto stream = Stream::Create(**driver);
  auto pool = MemoryPool::Create(**driver, 0, int64_t{64} << 20, stream->ref());
  auto in = pool->Allocate(stream->ref(), bytes.input);
  auto out = pool->Allocate(stream->ref(), bytes.output);
  auto host = PinnedMemory::Allocate(**driver, bytes.input + bytes.output);
  auto done = Event::Create(**driver, false);
  Spin spin;
  KernelStep step;
  for (const KernelRow& row : KernelRows()) {
    if (row.kind == KernelKind::kForward && row.head_dim == p.qk_head_dim) step.row = row;
  }
  step.params.tile_count = static_cast<int32_t>(p.q_heads * (p.q_len / step.row.tile.q_rows));
  std::vector<double> seconds;
  for (int n = 0; n < kLatencyCalls; ++n) {
    const Clock::time_point begin = Clock::now();
    CHECK(stream->ref().CopyIn(in->address(), host->bytes().data(), bytes.input).ok());
    CHECK(spin.Enqueue(**driver, stream->ref(), SpinSeconds(step, p.kv_len)).ok());
    CHECK(stream->ref()
              .CopyOut(host->bytes().data() + bytes.input, out->address(), bytes.output)
              .ok());
    CHECK(stream->ref().Record(*done).ok());
    while (!*done->HasPassed()) {
    }
    seconds.push_back(SecondsSince(begin));
  }
  spin.Unload();
  return Sorted(seconds);
}

void ReportLatency(Gpu& gpu) {
  const Problem p = Heads(256, 64, 4);
  gpu.keys = p.kv_len;
  const std::vector<double> bare = BareLatencies(p);
  CallMemory memory(gpu, p, 1);
  std::vector<double> seconds;
  for (int n = 0; n < kLatencyCalls; ++n) {
    const Clock::time_point begin = Clock::now();
    CHECK(gpu.engine->Forward(memory.calls()).ok());
    seconds.push_back(SecondsSince(begin));
  }
  const std::vector<double> engine = Sorted(seconds);
  std::printf("latency of one call N=256 D=64 H=4, us     p50      p99\n");
  auto at = [](const std::vector<double>& v, double q) {
    return 1e6 * v[static_cast<size_t>(q * static_cast<double>(v.size() - 1))];
  };
  std::printf("  bare copy + kernel + copy           %8.1f %8.1f\n", at(bare, .5), at(bare, .99));
  std::printf("  engine                              %8.1f %8.1f\n", at(engine, .5),
              at(engine, .99));
  std::printf("  added                               %8.1f %8.1f\n", at(engine, .5) - at(bare, .5),
              at(engine, .99) - at(bare, .99));
}

void ReportSeveral(int devices) {
  const Problem p = Heads(4096, 128, 8);
  double one = 0;
  for (int count : {1, devices}) {
    std::vector<std::unique_ptr<Gpu>> gpus;
    for (int n = 0; n < count; ++n) gpus.push_back(std::make_unique<Gpu>(n));
    std::vector<LoadResult> results(count);
    std::vector<std::thread> threads;
    for (int n = 0; n < count; ++n) {
      threads.emplace_back([&, n] { results[n] = RunLoad(*gpus[n], p, 4, 1, 3.0); });
    }
    for (std::thread& thread : threads) thread.join();
    double rate = 0;
    for (const LoadResult& result : results) {
      rate += static_cast<double>(result.calls) / result.wall;
    }
    if (count == 1) one = rate;
    std::printf("%d GPUs, N=4096 D=128 H=8: %.0f calls/s, %.2f times one\n", count, rate,
                rate / one);
    for (auto& gpu : gpus) gpu->spin->Unload();
  }
}

int TrapMain() {
  Gpu gpu(0, kTrapPtx);
  const Problem p = Heads(1024, 64, 16);
  gpu.keys = p.kv_len;
  std::vector<std::thread> callers;
  std::atomic<int> lost{0};
  for (int n = 0; n < 4; ++n) {
    callers.emplace_back([&] {
      CallMemory memory(gpu, p, 1);
      const Clock::time_point begin = Clock::now();
      const absl::Status status = gpu.engine->Forward(memory.calls()).status();
      std::printf("after %.1f ms: %s\n", 1e3 * SecondsSince(begin), status.ToString().c_str());
      lost += IsDeviceLost(status);
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::printf("%d of 4 launches say that the device is lost\n", lost.load());
  return lost == 4 ? 0 : 1;
}

int Main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--trap") return TrapMain();
  const int devices = argc == 3 && std::string(argv[1]) == "--devices" ? std::atoi(argv[2]) : 1;
  {
    const Link link = MeasureLink();
    Gpu gpu(0);
    std::printf("%s\n", gpu.engine->info().device.c_str());
    ReportOverlap(gpu, link);
    ReportBatching(gpu);
    ReportLatency(gpu);
    gpu.spin->Unload();
  }
  if (devices > 1) ReportSeveral(devices);
  return 0;
}

}  // namespace
}  // namespace attnd::cuda

int main(int argc, char** argv) { return attnd::cuda::Main(argc, argv); }
