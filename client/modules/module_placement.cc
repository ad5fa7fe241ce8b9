#include "client/modules/module_placement.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>

#include "absl/random/random.h"
#include "base/status_macros.h"
#include "client/call/poll_hook.h"
#include "client/call/unary_call.h"

namespace attnd {
namespace {

constexpr absl::Duration kPlacementTimeout = absl::Seconds(2);
// Placing and registering take three to four round trips, of 20 ms between distant hosts.
constexpr absl::Duration kLongestWait = absl::Milliseconds(500);
constexpr size_t kChoices = 2;  // of a module that leaves its server
// Queues that differ by less are the same: they change with each call.
constexpr double kQueueSeconds = 0.25;

struct Candidate {
  int address;
  std::tuple<double, double> load;  // less is better
};

// An older server tells nothing.
Candidate CandidateOf(const PlacementCalls& calls, int address) {
  const ReportedLoad load = calls.load_of(address).value_or(ReportedLoad());
  return {address, {std::floor(load.queue_seconds / kQueueSeconds), load.memory}};
}

}  // namespace

absl::StatusOr<Placement> PlaceModule(const PlacementCalls& calls,
                                      const v1::RegisterModuleRequest& request, int leaves,
                                      absl::BitGenRef random) {
  std::vector<int> addresses = calls.addresses;
  std::erase(addresses, leaves);
  if (addresses.size() == 1 && leaves < 0) return Placement{addresses.front()};
  RETURN_IF_ERROR(calls.wait(absl::Uniform(random, 0.0, 1.0) * kLongestWait));
  const auto lists = calls.each(addresses, "/attnd.v1.Modules/ListModules", "");
  std::optional<Placement> there;
  std::vector<Candidate> candidates;
  for (size_t n = 0; n < addresses.size(); ++n) {
    v1::ListModulesResponse list;
    if (!lists[n].ok() || !list.ParseFromString(*lists[n])) continue;
    candidates.push_back(CandidateOf(calls, addresses[n]));
    for (const v1::ModuleStatus& module : list.module()) {
      const bool is_later = !there.has_value() || module.owner_epoch() > there->owner_epoch;
      if (module.name() == request.name() && is_later) {
        there = Placement{addresses[n], module.owner_epoch()};
      }
    }
  }
  if (there.has_value()) return *there;
  std::shuffle(candidates.begin(), candidates.end(), random);
  const auto choices =
      candidates.begin() + static_cast<ptrdiff_t>(std::min(
                               leaves < 0 ? candidates.size() : kChoices, candidates.size()));
  const auto by_load = [](const Candidate& x, const Candidate& y) { return x.load < y.load; };
  std::stable_sort(candidates.begin(), choices, by_load);
  std::stable_sort(choices, candidates.end(), by_load);
  addresses.clear();
  for (const Candidate& one : candidates) addresses.push_back(one.address);
  v1::RegisterModuleRequest dry = request;
  dry.set_dry_run(true);
  const auto plans = calls.each(addresses, "/attnd.v1.Modules/Register", dry.SerializeAsString());
  absl::Status why =
      absl::UnavailableError("none of the client's addresses answers; is attnd running there?");
  for (size_t n = plans.size(); n-- > 0;) {
    if (!plans[n].ok()) why = plans[n].status();
  }
  for (size_t n = 0; n < plans.size(); ++n) {
    if (plans[n].ok()) return Placement{addresses[n]};
  }
  return why;
}

absl::StatusOr<Placement> PlaceModule(const ClientCore& core,
                                      const v1::RegisterModuleRequest& request, int leaves,
                                      absl::Time deadline, const CallOptions& options) {
  const PlacementCalls calls = {
      .addresses = core.connections.usable_addresses(),
      .each =
          [&](const std::vector<int>& addresses, const std::string& method,
              const std::string& message) {
            const absl::Time until = std::min(deadline, core.clock.Now() + kPlacementTimeout);
            return CallEach(core, addresses, method, message, until, options);
          },
      .load_of = [&](int address) { return core.connections.modules_of(address); },
      .wait = [&](absl::Duration delay) { return WaitFor(delay, options); }};
  absl::BitGen random;
  return PlaceModule(calls, request, leaves, random);
}

}  // namespace attnd
