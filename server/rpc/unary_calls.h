// UnaryCalls: Forward and Backward in one message each way, on completion queues of our own.
//
// A queue has one thread, which takes a call, computes it where it is small and the engine is idle,
// and sends its reply, so that a small call wakes no other thread. It spins shortly before it
// blocks (SpinWait). Large requests are copied, and large replies sent, on ServiceDeps::transfers;
// masks that are not compiled yet have MaskWorkers. The callback API would hand each call to one of
// gRPC's threads; for streams, which move much, that is the faster way.
//
//   builder → UnaryCalls → BuildAndStart → Start → ... → server's Shutdown → ~UnaryCalls
//
// Threads: one builds, starts and destroys it.
#pragma once

#include <grpcpp/server_builder.h>

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "server/rpc/service.h"

namespace attnd {

class UnaryCalls {
 public:
  // Adds its queues to a server that is being built. `service` outlives it.
  UnaryCalls(AttentionService& service, int threads, grpc::ServerBuilder& builder);
  // The server's Shutdown has returned, or it never started.
  ~UnaryCalls();

  // Once the server has started.
  void Start();
  // Until every call that has arrived has ended.
  void Wait();
  // When the thread of a queue counts as stuck in a reaction.
  absl::Time stuck_at() const;

 private:
  class Queue;
  class Call;
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace attnd
