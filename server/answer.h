// Answer: the Result of a call that has been computed. It decides what keeps the memory of the
// call: the reply until it is sent, and for a kept forward a lease as well. Any thread.
#pragma once

#include "kernels/backend.h"
#include "server/launch.h"
#include "server/result.h"

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
