// AdmissionLimits, and the accounts that are held against them: of a device, of a caller, of all.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/call/call.h"

namespace attnd {

struct AdmissionLimits {
  int64_t memory_bytes = int64_t{1} << 30;  // staging of inputs, workspace and outputs together
  int64_t max_calls = 1024;                 // admitted and not yet computed
  double max_queue_seconds = 30;            // estimated work ahead of a new call
  int64_t caller_max_calls = 1024;          // of max_calls, by one caller
  int64_t caller_max_bytes = int64_t{1} << 30;
  int64_t call_bytes = int64_t{224} << 20;  // of calls beside their tensors: CallRoom
  int64_t max_reply_bytes = int64_t{16} << 20;
  absl::Duration max_deadline = absl::Minutes(10);  // of a call that brings none, or a later one
};

// Adds up what admitted calls need of one device. Seconds are CostModel's estimates, without its
// pace.
struct AdmissionDeviceUse {
  int64_t calls = 0;
  int64_t memory_bytes = 0;  // of BackendInfo::memory_bytes
  int64_t lease_bytes = 0;   // of what calls left behind there; of that memory too
  int64_t held_bytes = 0;    // of HoldDeviceMemory; likewise
  double seconds = 0;
};

// A snapshot for metrics.
struct AdmissionUse {
  int64_t calls = 0;
  int64_t bytes = 0;        // of calls, those of modules too, until their reply is sent
  int64_t lease_bytes = 0;  // of what calls left behind; of memory_bytes too
  double seconds = 0;
};

// The calls of one caller at one priority: the batcher runs them in order, by one weight.
struct CallerFlow {
  std::string caller;
  Priority priority = Priority::kNormal;

  friend bool operator==(const CallerFlow&, const CallerFlow&) = default;
  template <class Hash>
  friend Hash AbslHashValue(Hash hash, const CallerFlow& flow) {
    return Hash::combine(std::move(hash), flow.caller, flow.priority);
  }
};

}  // namespace attnd
