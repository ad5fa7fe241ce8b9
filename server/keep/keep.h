// Keep: everything that the server keeps for callers between their calls: residuals under leases,
// masks by their ids, attention maps by their tokens, and room for masks that are on their way.
//
// Destruction: its thread ends first, then all that is kept goes. Residuals may lie in a device's
// memory, so Keep goes before the engines, and after the calls that read from it.
// Threads: any.
#pragma once

#include <memory>

#include "attention/mask_plans.h"
#include "base/clock.h"
#include "base/periodic.h"
#include "server/keep/lease_table.h"
#include "server/keep/lease_token.h"
#include "server/keep/map_table.h"
#include "server/keep/mask_arrivals.h"
#include "server/keep/mask_table.h"
#include "server/metrics/metrics.h"

namespace attnd {

struct KeepLimits {
  const LeaseLimits& leases;
  const MaskTableLimits& masks;
  const MapTableLimits& maps;
};

class Keep {
 public:
  // `metrics` and `clock` outlive it. `plans`: the engines'; null for its own.
  Keep(const KeepLimits& limits, const TokenIssuer& issuer, std::shared_ptr<MaskPlans> plans,
       Metrics& metrics, const Clock& clock);

  LeaseTable& leases() { return leases_; }
  MaskTable& masks() { return masks_; }
  MapTable& maps() { return maps_; }
  MaskArrivals& mask_arrivals() { return mask_arrivals_; }

 private:
  LeaseTable leases_;
  MaskTable masks_;
  MapTable maps_;
  MaskArrivals mask_arrivals_;
  Periodic expires_leases_;
};

}  // namespace attnd
