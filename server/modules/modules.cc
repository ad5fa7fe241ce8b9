#include "server/modules/modules.h"

#include <utility>

namespace attnd {

Modules::Modules(const ModuleOptions& options, std::unique_ptr<ModuleEngine> engine,
                 const std::vector<std::string>& devices, const TokenIssuer& issuer,
                 const LeaseLimits& leases, absl::Duration longest, const Deps& deps)
    : engine_(std::move(engine)),
      metrics_(deps.metrics.AddModules(devices)),
      table_(options, issuer, deps.clock),
      calls_({table_, *engine_, deps.staging, metrics_, devices, leases.ttl, leases.max_ttl,
              options.state_dir, options.save_every, options.shadow_every, deps.log}),
      service_({calls_,
                {deps.clock, deps.metrics, deps.calls},
                deps.auth,
                metrics_,
                deps.log,
                longest}) {}

}  // namespace attnd
