// PlaceModule: the address at which a module is registered, of a client that has several.
//
//     ListModules of each → some have the name: the one whose owner is the latest
//                         → Register(dry_run) of each → of those where it fits, the one whose
//                           modules have the least to do, then the most memory; of equals any
//
// One that leaves its server has others that do so too, and looks at two of them alone, at random:
// the least loaded would get all. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

struct Placement {
  int address = 0;
  uint64_t owner_epoch = 0;  // of the module that is there; 0: none, or nobody was asked
};

// `leaves`: the address that it leaves, which is not asked; −1: none. Errors: UNAVAILABLE, where
// nobody answers in time; of a module that fits nowhere, what one of the servers says.
absl::StatusOr<Placement> PlaceModule(const ClientCore& core,
                                      const v1::RegisterModuleRequest& request, int leaves,
                                      absl::Time deadline, const CallOptions& options);

}  // namespace attnd
