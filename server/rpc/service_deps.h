// ServiceDeps: what the gRPC methods use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/admission/staging_pool.h"
#include "server/keep/keep.h"
#include "server/metrics/metrics.h"
#include "server/rpc/calls.h"
#include "server/schedule/device_worker.h"
#include "server/security/auth.h"
#include "server/shared_memory/shared_memory.h"

namespace attnd {

// A message up to this is moved by the thread that has it: a socket takes it at once.
inline constexpr int64_t kBytesAtOnce = 256 << 10;

// An engine under its device's name: "cpu", "gpu0".
struct NamedEngine {
  std::string name;
  const Backend* engine;
};

// The objects that the service uses and does not own; all outlive it.
struct ServiceDeps {
  Keep& keep;
  Calls& calls;
  StagingPool& staging;
  SharedMemoryTable& shared_memory;
  Workers& worker;
  Metrics& metrics;
  const Authenticator& auth;
  const Clock& clock;
  Logger& log;
  const BackendInfo& engine;
  const std::vector<NamedEngine>& engines;
  const v1::GetServerInfoResponse& server_info;
  absl::Duration slow_call;
};

}  // namespace attnd
