#include "server/rpc/calls.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/cpu_quota.h"

namespace attnd {
namespace {

// On 16 cores 4 move a little more than 8 do.
int TransferThreadCount() { return std::clamp(AvailableCpus() / 4, 1, 8); }

// A caller has one of them at a time; two callers need not wait for each other.
int MaskThreadCount() { return std::clamp(AvailableCpus() / 4, 2, 4); }

}  // namespace

Calls::Calls(const AdmissionLimits& limits, const TransferLimits& transfers,
             std::vector<AdmissionDevice> devices, MemoryReclaimer& reclaimer, const Clock& clock)
    : device_count_(static_cast<int>(devices.size())),
      admission_(limits, std::move(devices), clock, &reclaimer),
      recent_work_(clock, device_count_),
      call_bytes_(limits.call_bytes),
      watch_(transfers),
      mask_workers_(MaskThreadCount(), limits.caller_max_calls),
      transfers_(TransferThreadCount()) {}

Calls::~Calls() {
  CHECK(open_.count() == 0);  // gRPC has ended them all: what they use may go
}

}  // namespace attnd
