// A Forward on a module's instance, for the call of that name and for a Backward whose activations
// are gone. Any thread that holds the instance.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "modules/module_engine.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/modules/payloads.h"
#include "server/modules/registered_module.h"

namespace attnd {

// Digests the fields that identify a micro-batch besides its numbers: rows, layers, seed and
// offset.
std::string ForwardDigest(const v1::ModuleForwardHeader& header);

// Holds what a Forward's header says.
struct ForwardRun {
  const CallRows* rows = nullptr;
  LayerRange layers;
  CallDropout dropout;
  bool makes_room = false;
  TransferSeconds* transfers = nullptr;
};

// UNAVAILABLE ACTIVATION_PRESSURE, CANCELLED, DEADLINE_EXCEEDED, or what the engine says.
absl::StatusOr<ActivationId> RunForward(RegisteredModule::Hold& hold, const ForwardRun& run,
                                        bool keep, const Payloads& payloads, const CallWait& wait,
                                        DeviceYield& yield);

}  // namespace attnd
