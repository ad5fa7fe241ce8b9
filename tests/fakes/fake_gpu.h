// FakeGpu: GPUs on the host with a clock of their own, behind the stand-in for libcuda.so.1
// (fake_cuda.cc). Streams hold operations; two copy engines and one compute engine a device run one
// operation each at a time. An operation's effect happens when it completes, so memory that was
// given away too early is seen. The clock moves only when a call asks for an event that has not
// passed: it jumps to the next completion. No thread of its own, no sleeping; any thread.
//
// Kernels do no attention: "forward" copies q to o (rows as far as they go) and writes the row's
// number to lse; "backward" copies q, k, v to d_q, d_k, d_v. That is enough to see memory mixed up.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "kernels/rules/params.h"

namespace attnd::fake {

enum class EngineKind : uint8_t { kUpload, kCompute, kDownload, kNone };

struct EventState {
  int64_t recorded = 0;  // how often recorded, and how often that was reached
  int64_t passed = 0;
  double time = 0;
};
// Destroyed while operations still name it, an event lives on for them (cuEventDestroy).
struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

struct Operation {
  EngineKind engine = EngineKind::kNone;
  double seconds = 0;
  std::function<void()> effect;        // at completion
  std::shared_ptr<EventState> record;  // passes when it is reached
  std::shared_ptr<EventState> wait;    // until it has passed `wait_for` times
  int64_t wait_for = 0;
  bool traps = false;  // the device is lost when it completes
  double finish = -1;  // once begun
};

struct Device;
struct Stream {
  Device* device = nullptr;
  std::deque<Operation> operations;
};
struct Pool {
  Device* device = nullptr;
  int64_t limit = 0, used = 0, reserved = 0;
};
struct Function {
  std::string name;
};
struct Module {
  std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Device {
  int ordinal = 0;
  CUresult lost = CUDA_SUCCESS;
  bool busy[3] = {};
  int trap_in = -1;  // launches until one traps
  std::vector<Stream*> streams;
  std::map<CUdeviceptr, std::pair<Pool*, int64_t>> blocks;
};

inline constexpr int kMaxDevices = 4;
inline constexpr int64_t kTotalBytes = int64_t{16} << 30;
inline constexpr int64_t kFreeBytes = kTotalBytes - (int64_t{1} << 30);

// Everything there is. Members are under `mutex`.
struct World {
  std::mutex mutex;
  std::map<std::string, std::pair<int, CUresult>> failures;
  std::map<std::string, int64_t> calls;
  int live = 0;
  int launches = 0;
  int device_count = 1;
  Device devices[kMaxDevices];
  double now = 0;
  std::mt19937_64 random{1};
  double jitter = 0;  // operations take up to 1 + jitter times as long

  World();
  void Push(Stream& stream, Operation operation);
  // Runs what can run and then the next completion. False when nothing is left to do.
  bool Step(Device& device);
  void Drain(Stream& stream);

 private:
  bool BeginOrPass(Stream& stream);
};
World& world();

// Runs the named kernel over its tiles.
void RunKernel(const std::string& name, const LaunchParams& params);

}  // namespace attnd::fake
