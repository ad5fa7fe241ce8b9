// PlaceModule: the address at which a module is registered, of a client that has several.
//
//     a moment → ListModules of each → some have the name: the one whose owner is the latest
//                → Register(dry_run) of each → of those where it fits, the one whose modules have
//                  the least to do, then the most memory; of equals any
//
// Clients that begin together would all choose the same server, so each first waits for a random
// moment, after which it sees what those before it have chosen. One that leaves its server has
// others that do so too, and looks at two of them alone, at random: the least loaded would get all.
// Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/random/bit_gen_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/channels/reported_load.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

struct Placement {
  int address = 0;
  uint64_t owner_epoch = 0;  // of the module that is there; 0: none, or nobody was asked
};

// Its client, as far as it needs it.
struct PlacementCalls {
  std::vector<int> addresses;  // that can be expected to answer
  // The same call to each of these; their replies in the same order, after which `load_of` knows
  // what came with them.
  std::function<std::vector<absl::StatusOr<std::string>>(
      const std::vector<int>& addresses, const std::string& method, const std::string& request)>
      each;
  std::function<std::optional<ReportedLoad>(int address)> load_of;
  std::function<absl::Status(absl::Duration)> wait;  // CANCELLED: the caller did
};

// `leaves`: the address that it leaves, which is not asked; −1: none. Errors: UNAVAILABLE, where
// nobody answers in time; of a module that fits nowhere, what one of the servers says.
absl::StatusOr<Placement> PlaceModule(const PlacementCalls& calls,
                                      const v1::RegisterModuleRequest& request, int leaves,
                                      absl::BitGenRef random);
// The client's calls, which end at `deadline`.
absl::StatusOr<Placement> PlaceModule(const ClientCore& core,
                                      const v1::RegisterModuleRequest& request, int leaves,
                                      absl::Time deadline, const CallOptions& options);

}  // namespace attnd
