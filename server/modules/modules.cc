#include "server/modules/modules.h"

#include <utility>

#include "absl/time/clock.h"

namespace attnd {
namespace {

constexpr absl::Duration kSweepEvery = absl::Minutes(1);

}  // namespace

Modules::Modules(const ModuleOptions& options, std::unique_ptr<StateRoot> states,
                 std::unique_ptr<ModuleEngine> engine, const std::vector<std::string>& devices,
                 const TokenIssuer& issuer, const LeaseLimits& leases, absl::Duration longest,
                 const Deps& deps)
    : engine_(std::move(engine)),
      states_(std::move(states)),
      metrics_(deps.metrics.AddModules(devices)),
      table_(options, issuer, deps.clock),
      calls_({table_, *engine_, deps.calls.admission(), deps.staging, &deps.leases,
              deps.shared_memory, metrics_, devices, leases.ttl, leases.max_ttl, states_.get(),
              state_lines_, options.save_every, options.shadow_every, deps.log}),
      service_({calls_,
                {deps.clock, deps.metrics, deps.calls},
                deps.auth,
                metrics_,
                deps.log,
                longest}) {
  // By the clock of the files' times.
  if (states_ != nullptr) sweeps_.emplace(kSweepEvery, [this] { states_->Sweep(absl::Now()); });
}

}  // namespace attnd
