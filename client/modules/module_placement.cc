#include "client/modules/module_placement.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/random/random.h"
#include "client/call/unary_call.h"

namespace attnd {
namespace {

constexpr absl::Duration kPlacementTimeout = absl::Seconds(2);

struct Candidate {
  int address;
  uint64_t bytes;  // of the caller's modules
};

}  // namespace

absl::StatusOr<int> PlaceModule(const ClientCore& core, const v1::RegisterModuleRequest& request,
                                int except, absl::Time deadline, const CallOptions& options) {
  std::vector<int> addresses = core.connections.usable_addresses();
  std::erase(addresses, except);
  if (addresses.size() == 1) return addresses.front();
  const absl::Time until = std::min(deadline, core.clock.Now() + kPlacementTimeout);
  const auto lists = CallEach(core, addresses, "/attnd.v1.Modules/ListModules", "", until, options);
  std::vector<Candidate> candidates;
  for (size_t n = 0; n < addresses.size(); ++n) {
    v1::ListModulesResponse list;
    if (!lists[n].ok() || !list.ParseFromString(*lists[n])) continue;
    Candidate& one = candidates.emplace_back(Candidate{addresses[n], 0});
    for (const v1::ModuleStatus& module : list.module()) {
      if (module.name() == request.name()) return one.address;
      one.bytes += module.hbm_bytes() + module.host_bytes();
    }
  }
  absl::BitGen random;
  std::shuffle(candidates.begin(), candidates.end(), random);
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& x, const Candidate& y) { return x.bytes < y.bytes; });
  addresses.clear();
  for (const Candidate& one : candidates) addresses.push_back(one.address);
  v1::RegisterModuleRequest dry = request;
  dry.set_dry_run(true);
  const auto plans = CallEach(core, addresses, "/attnd.v1.Modules/Register",
                              dry.SerializeAsString(), until, options);
  absl::Status why =
      absl::UnavailableError("none of the client's addresses answers; is attnd running there?");
  for (size_t n = plans.size(); n-- > 0;) {
    if (!plans[n].ok()) why = plans[n].status();
  }
  for (size_t n = 0; n < plans.size(); ++n) {
    if (plans[n].ok()) return addresses[n];
  }
  return why;
}

}  // namespace attnd
