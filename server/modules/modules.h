// Modules: the modules that the server computes for callers, with the engine that computes them and
// the service by which they are reached.
//
// Destruction: the gRPC server has ended the service's calls. The service goes first, with the
// threads that served them, then the table with all instances, last their engine. The engines of
// attention, which that engine uses, and Calls go later.
// Threads: any; one makes and ends it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/periodic.h"
#include "modules/module_engine.h"
#include "server/admission/staging_pool.h"
#include "server/keep/lease_table.h"
#include "server/keep/lease_token.h"
#include "server/metrics/metrics.h"
#include "server/metrics/module_metrics.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_table.h"
#include "server/modules/modules_service.h"
#include "server/modules/state_root.h"
#include "server/rpc/call_log_limit.h"
#include "server/rpc/calls.h"
#include "server/security/auth.h"

namespace attnd {

class Modules {
 public:
  // All outlive it.
  struct Deps {
    StagingPool& staging;
    MemoryReclaimer& leases;  // in it
    SharedMemoryTable& shared_memory;
    Calls& calls;
    Metrics& metrics;
    const Authenticator& auth;
    const Clock& clock;
    Logger& log;
  };
  // `states`: null: none outlives the process. `devices`: the names of the engine's. `leases`: of
  // kept activations. `longest`: the most that a call may take.
  Modules(const ModuleOptions& options, std::unique_ptr<StateRoot> states,
          std::unique_ptr<ModuleEngine> engine, const std::vector<std::string>& devices,
          const TokenIssuer& issuer, const LeaseLimits& leases, absl::Duration longest,
          const Deps& deps);

  const ModuleEngine& engine() const { return *engine_; }
  ModuleTable& table() { return table_; }
  ModulesService& service() { return service_; }
  double QueueSeconds(int device) const { return calls_.QueueSeconds(device); }
  StateRoot* states() { return states_.get(); }
  void StartDraining() { calls_.StartDraining(); }
  absl::Time stuck_at(int device) const { return calls_.stuck_at(device); }

 private:
  const std::unique_ptr<ModuleEngine> engine_;
  const std::unique_ptr<StateRoot> states_;
  CallLogLimit state_lines_{1, absl::Minutes(1)};
  ModuleMetrics& metrics_;
  ModuleTable table_;
  ModuleCalls calls_;
  ModulesService service_;
  std::optional<Periodic> sweeps_;  // of states_
};

}  // namespace attnd
