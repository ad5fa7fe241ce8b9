// Backend: the one virtual interface of an engine that computes attention (reference, cpu, cuda). A
// launch takes an array of calls and runs them together; each call's result is bitwise the same
// whatever else is in the launch.
//
// Order of use: Supports (before anything is copied) → WorkspaceBytes, DeviceBytes (what admission
// reserves) → Forward or Backward. Threads: any, several launches at once; the engine orders them
// itself, and what gains by it overlaps (transfers with kernels on a GPU, small calls on a CPU).
// Stop    a call's stop token is looked at before its upload, before each kernel and before its
//         download; a launch whose calls have all stopped ends early and is still OK.
// Errors  what an engine cannot run is UNIMPLEMENTED from Supports, naming the field; a launch
//         fails only for reasons of the device (INTERNAL), and if IsDeviceLost, for good.
// Memory  pointers of a call are host memory, 64-byte aligned, and outlive the launch. Faster where
//         the memory was given to RegisterHost, and where inputs (outputs) follow one another
//         without a gap: mask, bias, k, v, q, lse, o, d_o, d_lse (lse, o; d_k, d_v, d_q, d_bias,
//         d_sink).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/masks/compiled_mask.h"
#include "attention/patterns/captured_map.h"
#include "attention/problem.h"

namespace attnd {

// Keeps the tensors that a forward read and wrote (q, k, v, mask, bias, o, lse), left in its
// device's memory for backward calls of that engine. Freed when it dies, on any thread: when no
// launch reads it any more, and before the engine goes.
class DeviceResidual {
 public:
  virtual ~DeviceResidual() = default;
  virtual int64_t bytes() const = 0;
};

// Steps of two bytes from row to row of q, k and v where these are columns of wider rows, [batch,
// length] or packed; 0: they lie end to end.
struct RowStrides {
  int64_t q = 0, k = 0, v = 0;
};

// One forward problem. Tensors are contiguous in the problem's layout and element type.
struct ForwardCall {
  const Problem* problem = nullptr;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;  // iff problem->bool_mask
  const void* bias = nullptr;          // iff problem->bias
  void* o = nullptr;
  float* lse = nullptr;  // [batch, q_heads, q_len] or packed [q_heads, q_len]; always written
  std::byte* workspace = nullptr;  // WorkspaceBytes(problem, kForward), contents arbitrary
  std::stop_token stop;            // once requested, the outputs of this call no longer matter
  const CompiledMask* compiled_mask = nullptr;  // of problem->mask; the engine finds it itself
  // Set: the engine may leave the tensors on its device and tell here; a favour, null is no error.
  std::unique_ptr<DeviceResidual>* kept = nullptr;
  RowStrides strides;  // only where tensors lie in a GPU's memory (CudaBackend::PlanInPlace)
};

// One backward problem: o and lse as forward gave them (o rounded to its element type). With a
// residual, what lies there is not looked at here.
struct BackwardCall {
  const Problem* problem = nullptr;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;
  const void* bias = nullptr;
  const void* o = nullptr;
  const float* lse = nullptr;
  const void* d_o = nullptr;
  const float* d_lse = nullptr;  // null: zero
  void* d_q = nullptr;
  void* d_k = nullptr;
  void* d_v = nullptr;
  float* d_bias = nullptr;         // iff problem->bias->want_gradient: float32 of the bias's shape
  float* d_sink = nullptr;         // iff kSink: float32 [batch, q_heads], each batch entry's share
  std::byte* workspace = nullptr;  // WorkspaceBytes(problem, kBackward), contents arbitrary
  std::stop_token stop;
  const CompiledMask* compiled_mask = nullptr;
  const DeviceResidual* residual = nullptr;  // of this engine's forward of the same problem
  // As ForwardCall's; of dq, dk and dv only without kv_lengths.
  RowStrides strides, d_strides;
};

// Says what to capture of a forward, beside what it returns.
struct CaptureRequest {
  int64_t block = 0;      // rows and keys of a block of the pooled map
  bool keep_map = false;  // the map itself too
};

// OUT_OF_RANGE or UNIMPLEMENTED naming the field where no engine captures this: lengths above
// kMaxCaptureLength (a kept map: kMaxKeptMapLength), more than kMaxMapBlocks blocks, packed
// layouts. INVALID_ARGUMENT: no block.
absl::Status CheckCapture(const Problem& problem, const CaptureRequest& request);
inline constexpr int64_t kMaxCaptureLength = 65536, kMaxKeptMapLength = 4096;
inline constexpr int64_t kMaxMapBlocks = int64_t{1} << 20;

// Reports what a launch did, for receipts and metrics.
struct LaunchReport {
  std::string kernel;                                    // e.g. "cpu_forward_f32"
  double seconds = 0;                                    // of the kernel alone
  double upload_seconds = 0;                             // host to device; 0 on a CPU
  double download_seconds = 0;                           // device to host; 0 on a CPU
  AccumulateType accumulate = AccumulateType::kFloat32;  // what ran, whatever was asked for
  bool deterministic = true;
};

// How an engine runs calls with a mask by description: for reports.
struct MaskKernel {
  std::string kernel;       // as LaunchReport names it
  std::string reason;       // why this one
  MaskCompileOptions plan;  // the tiles that it visits
};

struct BackendInfo {
  std::string backend;          // "reference", "cpu", "cuda"
  std::string device;           // the processor's or GPU's name
  std::string architecture;     // vector target ("AVX3_ZEN4") or "sm_70"
  std::string uuid;             // of a GPU; empty otherwise
  int ordinal = 0;              // of a GPU, as CUDA_VISIBLE_DEVICES leaves them
  int64_t memory_bytes = 0;     // that launches may hold together; admission's upper bound
  int threads = 0;              // CPU engines
  int launches = 1;             // at once, so that nothing waits
  std::string pci_bus_id;       // of a GPU; empty otherwise
  double flops_per_second = 0;  // a first estimate for admission; it learns from then on
};

// Reports the use of a device's memory and queues, for metrics. Counters since the start.
struct DeviceUse {
  int64_t memory_total_bytes = 0;     // of the device
  int64_t memory_used_bytes = 0;      // by anybody, as its driver says
  int64_t memory_reserved_bytes = 0;  // held from the driver, in use or not
  int64_t memory_peak_bytes = 0;      // most ever in use
  int64_t input_bytes = 0, output_bytes = 0, workspace_bytes = 0, lease_bytes = 0;  // in use
  int64_t memory_free_bytes = 0;          // of what is reserved
  int64_t memory_largest_free_bytes = 0;  // of that, in one piece
  int64_t allocations = 0;                // launches, and leases that were kept
  int64_t allocation_failures = 0;        // launches that waited and leases that were not kept
  int64_t uploaded_bytes = 0, downloaded_bytes = 0;
  double upload_seconds = 0, kernel_seconds = 0, download_seconds = 0;  // busy
};

// Whether a launch's error means that this device answers nothing any more until the process is
// restarted.
bool IsDeviceLost(const absl::Status& status);
absl::Status DeviceLost(absl::Status status);  // marks it so

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const BackendInfo& info() const = 0;
  virtual absl::Status Supports(const Problem& problem, Direction direction) const = 0;
  // Names the kernel for a valid problem with a mask. UNIMPLEMENTED as Supports says it, or because
  // the engine does not tell.
  virtual absl::StatusOr<MaskKernel> KernelForMask(const Problem& problem,
                                                   Direction direction) const;
  virtual int64_t WorkspaceBytes(const Problem& problem, Direction direction) const = 0;
  // Device memory that a call takes while it is launched; 0 where tensors stay in host memory.
  virtual int64_t DeviceBytes(const Problem&, Direction) const { return 0; }
  // A forward that is kept takes so many bytes beside that.
  virtual int64_t KeepingBytes(const Problem&) const { return 0; }
  // A kept forward leaves so many bytes on the device, part of these; a backward on it takes so
  // much less. 0: nothing is left there.
  virtual int64_t ResidualBytes(const Problem&) const { return 0; }
  // Page-locks memory of calls to come, where that helps, until UnregisterHost or the engine's end;
  // no launch uses it by then. Takes long: never on the way of a call.
  virtual absl::Status RegisterHost(absl::Span<std::byte>) { return absl::OkStatus(); }
  virtual void UnregisterHost(absl::Span<std::byte>) {}
  virtual DeviceUse Use() const { return {}; }
  virtual absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) = 0;
  virtual absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) = 0;

  // Whether this engine has Capture. UNIMPLEMENTED otherwise.
  virtual absl::Status SupportsCapture() const;
  // Device memory that Capture takes, after the forward has given back its own.
  virtual int64_t CaptureBytes(const Problem&, const CaptureRequest&) const { return 0; }
  // The averaged attention map of a call that Forward has run: reads what it read, and its lse. The
  // same call has the same bits whatever else runs. `request` has passed CheckCapture. Errors are
  // Forward's; a call whose stop token is set may have any result.
  virtual absl::StatusOr<CapturedMap> Capture(const ForwardCall& call,
                                              const CaptureRequest& request);
};

}  // namespace attnd
