// ServiceDeps: what the gRPC methods use.
#pragma once

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/admission.h"
#include "server/auth.h"
#include "server/call_log_limit.h"
#include "server/call_watch.h"
#include "server/device_worker.h"
#include "server/lease_table.h"
#include "server/metrics.h"
#include "server/open_calls.h"
#include "server/reply_threads.h"
#include "server/shared_memory.h"
#include "server/staging_pool.h"

namespace attnd {

// What the service uses and does not own; all outlive it.
struct ServiceDeps {
  Admission& admission;
  StagingPool& staging;
  SharedMemoryTable& shared_memory;
  Workers& worker;
  LeaseTable& leases;
  ReplyThreads& reply_threads;
  Metrics& metrics;
  const Authenticator& auth;
  const Clock& clock;
  Logger& log;
  const BackendInfo& engine;
  const v1::GetServerInfoResponse& server_info;
  absl::Duration slow_call;
  CallLogLimit& log_limit;
  CallWatch& call_watch;
  OpenCalls& open_calls;
};

}  // namespace attnd
