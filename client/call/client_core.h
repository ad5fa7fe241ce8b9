// ClientCore: the parts that all calls of one client share, of attention and of modules.
#pragma once

#include <grpcpp/client_context.h>

#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/task_queue.h"
#include "client/call/client_counters.h"
#include "client/call/shared_memory.h"
#include "client/channels/bulk_queue.h"
#include "client/channels/completion_queues.h"
#include "client/channels/connections.h"
#include "client/channels/retry.h"
#include "client/types/client_options.h"

namespace attnd {

// The client owns them all.
struct ClientCore {
  const ClientOptions& options;
  const Clock& clock;
  Connections& connections;
  RetryBudget& budget;
  CompletionQueues& queues;  // of small calls
  BulkQueue& bulk_queue;
  TaskQueue& workers;        // beside the callers' threads, for calls of many shards
  TaskQueue& carriers;       // likewise, for calls of modules with much to send
  int max_workers;           // of one call, the caller's thread included
  int in_flight_per_worker;  // RPCs
  ClientCounters& counters;
  SharedMemory* shared_memory = nullptr;  // with the only address; null: none
};

// Deadline, token, waiting and trace of one RPC.
void PrepareContext(const ClientOptions& options, absl::Time deadline,
                    const std::string& traceparent, grpc::ClientContext& context);

}  // namespace attnd
