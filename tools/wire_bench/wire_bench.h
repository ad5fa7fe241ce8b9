// WireBench: bytes per second, processor time per byte and latency of the wire, for calls in which
// nothing or next to nothing is computed. Traffic has the shape of attention's own:
//
//   echo       as much back as there          q and o, one key
//   forward    3 : 1                          q, k, v and o
//   backward   5 : 3                          q, k, v, o, d_o and dq, dk, dv
//
// Against a daemon that computes nothing (tools/benchmarks:null_attnd) the figures are the wire's;
// against any other, forward and backward count its engine too.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/types/client_options.h"

namespace attnd {

enum class WirePattern { kEcho, kForward, kBackward };
enum class WireMode { kUnary, kStream, kMemfd };

struct WireLoad {
  WirePattern pattern = WirePattern::kEcho;
  WireMode mode = WireMode::kStream;
  int channels = 8;
  int depth = 2;                            // calls in flight on each channel
  int64_t tensor_bytes = int64_t{8} << 20;  // of one tensor
  bool small_calls = false;                 // 4 KiB each way beside it, one at a time
  absl::Duration warmup, duration;
};

struct WireLatency {
  double p50 = 0, p99 = 0;  // seconds
};

struct WireRow {
  WireLoad load;
  double up_bytes_per_second = 0, down_bytes_per_second = 0;  // payload
  double client_cpu_per_gb = 0;                               // seconds for 1e9 bytes, up and down
  // From the daemon's counters, where they can be read.
  std::optional<double> daemon_cpu_per_gb, copies_per_received_byte;
  WireLatency bulk;
  std::optional<WireLatency> small;
  std::map<std::string, int> errors;  // by code
};

// `metrics_url` empty: the daemon's counters are not read. Errors: the first call's.
absl::StatusOr<WireRow> RunWireBench(ClientOptions options, const WireLoad& load,
                                     const std::string& metrics_url);

const char* NameOf(WirePattern pattern);
const char* NameOf(WireMode mode);

}  // namespace attnd
