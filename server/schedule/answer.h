// Answer: makes the Result of a computed call. The Result owns the call's memory until the reply is
// sent; a kept forward's lease shares it, or owns what the engine left on the device. Any thread.
#pragma once

#include "kernels/backend.h"
#include "server/schedule/launch.h"
#include "server/schedule/result.h"

namespace attnd {

class Answer {
 public:
  // `launched` has no memory and no ticket afterwards.
  static Result Of(const DeviceWorkerDeps& deps, LaunchedCall& launched, const LaunchReport& report,
                   int batched_with);

 private:
  static void KeepOutputs(AdmittedCall& call, Result& result);
  static void LeaseHostMemory(LeaseTable& leases, AdmittedCall& call, Result& result);
  static void LeaseDeviceMemory(const DeviceWorkerDeps& deps, LaunchedCall& launched,
                                Result& result);
};

}  // namespace attnd
