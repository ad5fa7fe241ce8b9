// Calls: what every call passes on its way, whatever its method: admission, the count of open
// calls, the memory that they hold beside tensors, the watch over those whose peer is silent,
// threads for large messages and for masks, and
// the limit of log lines about failed calls.
//
// Destruction: the workers have stopped by then. FinishTransfers, before the gRPC server goes,
// because the threads of transfers may still be within a call's last step. Then the gRPC server,
// which waits for its calls, then this: no call is open any more, and only then do the threads of
// masks and the watch end, before admission, to which a call's ticket goes back.
// Threads: any; one makes and ends it.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/task_queue.h"
#include "server/admission/admission.h"
#include "server/call/transfer_progress.h"
#include "server/rpc/call_log_limit.h"
#include "server/rpc/call_watch.h"
#include "server/rpc/fair_shares.h"
#include "server/rpc/mask_workers.h"
#include "server/rpc/open_calls.h"
#include "server/rpc/recent_work.h"

namespace attnd {

class Calls {
 public:
  // `devices`, `reclaimer` and `clock` outlive it.
  Calls(const AdmissionLimits& limits, const TransferLimits& transfers,
        std::vector<AdmissionDevice> devices, MemoryReclaimer& reclaimer, const Clock& clock);
  ~Calls();

  Admission& admission() { return admission_; }
  // Copies large unary requests and hands large replies to gRPC. The thread that hands one over
  // also writes as much as the socket takes, milliseconds for a large tensor: a slot that did so
  // would keep the engine waiting, a completion queue's thread small calls. It holds as many tasks
  // as connections may have calls open.
  TaskQueue& transfers() { return *transfers_; }
  MaskWorkers& mask_workers() { return mask_workers_; }
  CallWatch& watch() { return watch_; }
  FairShares& call_bytes() { return call_bytes_; }  // CallRoom's
  CallLogLimit& log_limit() { return log_limit_; }
  OpenCalls& open() { return open_; }
  RecentWork& recent_work() { return recent_work_; }
  const RecentWork& recent_work() const { return recent_work_; }

  // Estimated work of all calls that are admitted and not computed, those of modules too.
  double QueueSeconds(int device) const {
    return admission_.QueueSeconds(device) + (module_queue_ ? module_queue_(device) : 0);
  }
  int device_count() const { return device_count_; }
  // How to ask for the modules' part. Before calls come.
  void SetModuleQueue(std::function<double(int device)> queue) { module_queue_ = std::move(queue); }

  // Runs what is left of transfers and ends their threads; there will be no others.
  void FinishTransfers() { transfers_.reset(); }

 private:
  const int device_count_;
  Admission admission_;
  std::function<double(int)> module_queue_;  // null: there are no modules
  RecentWork recent_work_;
  OpenCalls open_;
  FairShares call_bytes_;
  CallLogLimit log_limit_;
  CallWatch watch_;
  MaskWorkers mask_workers_;
  std::optional<TaskQueue> transfers_;
};

}  // namespace attnd
