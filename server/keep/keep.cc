#include "server/keep/keep.h"

#include <utility>

namespace attnd {
namespace {

constexpr absl::Duration kExpireLeasesEvery = absl::Seconds(1);

}  // namespace

Keep::Keep(const KeepLimits& limits, const TokenIssuer& issuer, std::shared_ptr<MaskPlans> plans,
           Metrics& metrics, const Clock& clock)
    : leases_(limits.leases, issuer, metrics, clock),
      masks_(limits.masks, clock, std::move(plans)),
      maps_(limits.maps, issuer, clock),
      mask_arrivals_(limits.masks.bytes, limits.masks.bytes_of_caller),
      expires_leases_(kExpireLeasesEvery, [this] { leases_.Expire(); }) {}

}  // namespace attnd
