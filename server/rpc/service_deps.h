// ServiceDeps: what the gRPC methods use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/task_queue.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/admission/admission.h"
#include "server/admission/staging_pool.h"
#include "server/keep/lease_table.h"
#include "server/keep/map_store.h"
#include "server/keep/mask_arrivals.h"
#include "server/keep/mask_store.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_log_limit.h"
#include "server/rpc/call_watch.h"
#include "server/rpc/mask_workers.h"
#include "server/rpc/open_calls.h"
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

// What the service uses and does not own; all outlive it.
struct ServiceDeps {
  Admission& admission;
  StagingPool& staging;
  SharedMemoryTable& shared_memory;
  Workers& worker;
  LeaseTable& leases;
  MaskStore& masks;
  MapStore& maps;
  MaskWorkers& mask_workers;
  MaskArrivals& mask_arrivals;
  // Copies large unary requests and hands large replies to gRPC. The thread that hands one over
  // also writes as much as the socket takes, milliseconds for a large tensor: a slot that did so
  // would keep the engine waiting, a completion queue's thread small calls. It holds as many tasks
  // as connections may have calls open.
  TaskQueue& transfers;
  Metrics& metrics;
  const Authenticator& auth;
  const Clock& clock;
  Logger& log;
  const BackendInfo& engine;
  const std::vector<NamedEngine>& engines;
  const v1::GetServerInfoResponse& server_info;
  absl::Duration slow_call;
  CallLogLimit& log_limit;
  CallWatch& call_watch;
  OpenCalls& open_calls;
};

}  // namespace attnd
