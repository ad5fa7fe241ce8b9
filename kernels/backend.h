// Backend: the one virtual interface of an engine that computes attention (reference, cpu, cuda). A
// launch takes an array of calls and runs them together; each call's result is bitwise the same
// whatever else is in the launch.
//
// Order of use: Supports (before anything is copied) → WorkspaceBytes (what admission reserves) →
// Forward or Backward. Threads: Supports, WorkspaceBytes and info may be called from any thread;
// Forward and Backward by one thread at a time. Errors: what an engine cannot run is UNIMPLEMENTED
// from Supports, naming the field; a launch fails only for reasons of the device (INTERNAL).
// Pointers of a call are in the device's reach, 64-byte aligned, and outlive the launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/problem.h"

namespace attnd {

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
};

// One backward problem: o and lse as forward gave them (o rounded to its element type).
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
};

// What a launch did, for receipts and metrics.
struct LaunchReport {
  std::string kernel;                                    // e.g. "cpu_forward_f32"
  double seconds = 0;                                    // of the kernel alone
  AccumulateType accumulate = AccumulateType::kFloat32;  // what ran, whatever was asked for
  bool deterministic = true;
};

struct BackendInfo {
  std::string backend;          // "reference", "cpu", "cuda"
  std::string device;           // the processor's or GPU's name
  std::string architecture;     // vector target ("AVX3_ZEN4") or "sm_70"
  std::string uuid;             // of a GPU; empty otherwise
  int64_t memory_bytes = 0;     // that the device can hold; admission's upper bound
  int threads = 0;              // CPU engines
  double flops_per_second = 0;  // a first estimate for admission; it learns from then on
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const BackendInfo& info() const = 0;
  virtual absl::Status Supports(const Problem& problem, Direction direction) const = 0;
  virtual int64_t WorkspaceBytes(const Problem& problem, Direction direction) const = 0;
  virtual absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) = 0;
  virtual absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) = 0;
};

}  // namespace attnd
