// PlaceModule: the address at which a module is registered, of a client that has several.
//
//     ListModules of each → one has the name: that one
//                         → Register(dry_run) of each → of those where it fits, the one where this
//                           caller's modules take the fewest bytes; of equals any
//
// Any thread.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

// `except`: an address that is not asked; −1: none. Errors: UNAVAILABLE, where nobody answers in
// time; of a module that fits nowhere, what one of the servers says.
absl::StatusOr<int> PlaceModule(const ClientCore& core, const v1::RegisterModuleRequest& request,
                                int except, absl::Time deadline, const CallOptions& options);

}  // namespace attnd
