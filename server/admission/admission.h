// Admission: decides whether this server runs a decoded call, before a byte of it is copied. An
// admitted call holds a Ticket for its memory and time.
//
//   larger than the budget → OUT_OF_RANGE          full now → UNAVAILABLE with RetryInfo
//   the caller's own quota → RESOURCE_EXHAUSTED    too late already → DEADLINE_EXCEEDED
//   what the engine cannot run → UNIMPLEMENTED     draining → UNAVAILABLE
//
// Device      Of several devices with enough memory, the one estimated to finish the call first;
//             chosen and taken in one step, so that calls that come together spread. A backward
//             on a residual runs on the device that holds it, whatever the wait.
// Leases      count against the memory, and are evicted before a call is refused.
// Full        The work ahead of a call is limited (max_queue_seconds), the call itself is not: an
//             idle server admits a call of any length.
// Too late    Work ahead is what the batcher will run first: of other callers' work only their
//             share, of the caller's own what is due earlier. A long queue delays its caller alone.
// Overload    A call that would break the deadline of an admitted one is refused. So that long
//             deadlines do not book all the time before short ones come, calls of every deadline
//             are refused at random, more often the less time is left: the same share of each.
// Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "kernels/backend.h"
#include "server/admission/admission_limits.h"
#include "server/admission/cost_model.h"
#include "server/admission/deadline_order.h"
#include "server/admission/staged_tensors.h"
#include "server/call/call.h"

namespace attnd {

class ReplySink;

// A device that calls may be admitted to. The pointees outlive Admission.
struct AdmissionDevice {
  const Backend* backend = nullptr;
  const CostModel* cost = nullptr;
};

// Frees memory of leases at a place: a device's number or kHostMemory. Any thread.
class MemoryReclaimer {
 public:
  virtual ~MemoryReclaimer() = default;
  // Whether the place's budget for leases could hold so much.
  virtual bool MayHold(int place, int64_t bytes) const = 0;
  // Tries to free `bytes`; returns how many it freed.
  virtual int64_t Reclaim(int place, int64_t bytes) = 0;
  // Frees one lease, even a recent one; false when there is none.
  virtual bool EvictOne(int place) = 0;
};

class AdmissionLedger;
struct DeviceChoice;
struct LeasesInTheWay;

// Ticket: bytes of staging memory, and bytes and seconds of one device, reserved for one call.
// Destroying it returns both, so that no path, error and cancel included, can leak budget. It may
// outlive the server inside a reply's slices. Any thread, one at a time; move-only.
class Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&& other) noexcept { *this = std::move(other); }
  Ticket& operator=(Ticket&& other) noexcept;
  ~Ticket();

  int64_t bytes() const { return bytes_; }
  double seconds() const { return seconds_; }
  int device() const { return device_; }
  // The place in the caller's order: `due` is the deadline, or sooner if that is far away.
  const DeadlineOrder::Place& place() const { return place_; }
  // The call begins to run, so that no other can pass it.
  void StartWork();
  // The device has finished the call: returns its device memory, time and place in the queue.
  void ReleaseWork();
  // Keeps `bytes` of the staging memory and returns the rest.
  void ShrinkTo(int64_t bytes);
  // ReleaseWork and ShrinkTo. The bytes then count as a lease's, no longer against the caller's
  // quota.
  void BecomeLease(int64_t bytes);
  // Moves `bytes` of the staging memory to a ticket of their own. Of HoldStaging's tickets alone.
  Ticket SplitOff(int64_t bytes);
  // Before ReleaseWork: moves `bytes` of the call's device memory to the ticket of a lease.
  Ticket LeaseDeviceMemory(int64_t bytes);

 private:
  friend class Admission;
  void EndDeviceLease();

  std::shared_ptr<AdmissionLedger> ledger_;  // shared with Admission and every other ticket
  CallerFlow flow_;
  DeadlineOrder::Place place_;
  int64_t bytes_ = 0;
  int device_ = 0;
  int64_t device_bytes_ = 0;
  int64_t device_lease_bytes_ = 0;
  double seconds_ = 0;
  bool working_ = false;
  bool lease_ = false;
};

// The caller, and the time until which the answer matters.
struct CallContext {
  uint64_t id = 0;  // unique in this process
  std::string caller;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time received_at;
  ReplySink* sink = nullptr;  // answered exactly once
  bool streamed = false;      // the reply is no single message, so it has no limit of its own
};

// AdmittedCall: a call with the memory and time that its Ticket reserves. Made only by Admission;
// move-only, and as small as a pointer.
class AdmittedCall {
 public:
  AdmittedCall(AdmittedCall&&) = default;
  AdmittedCall& operator=(AdmittedCall&&) = default;

  const AttentionCall& call() const { return parts_->call; }
  AttentionCall& call() { return parts_->call; }
  const CallMemory& memory() const { return parts_->memory; }
  // Once the engine has finished the call.
  void DropMemory() { parts_->memory = CallMemory(); }
  double flops() const { return parts_->flops; }
  const CallContext& context() const { return parts_->context; }
  Ticket& ticket() { return parts_->ticket; }
  const StagedTensors& staged() const { return parts_->staged; }
  StagedTensors& staged() { return parts_->staged; }
  int64_t bytes() const { return parts_->ticket.bytes(); }
  double seconds() const { return parts_->ticket.seconds(); }
  int device() const { return parts_->ticket.device(); }
  int64_t workspace_bytes() const { return parts_->workspace_bytes; }
  int64_t input_bytes() const { return parts_->input_bytes; }    // aligned, as they lie in staging
  int64_t output_bytes() const { return parts_->output_bytes; }  // aligned
  // A forward to be kept, whose tensors the engine leaves on the device if it finds room there.
  bool keeps_on_device() const { return parts_->keeps_on_device; }
  // Whether the engine reads or writes the tensor in shared memory. Of a forward that is kept in
  // host memory the tensors are copied.
  bool InPlace(const TensorSpec& tensor) const {
    return tensor.region != kNoRegion && (!call().keep_residual() || keeps_on_device());
  }
  absl::Time admitted_at() const { return parts_->admitted_at; }
  const DeadlineOrder::Place& place() const { return parts_->ticket.place(); }
  // Begun later, it misses its deadline even if it takes half of its estimate.
  absl::Time latest_start() const { return parts_->latest_start; }

 private:
  friend class Admission;
  struct Parts {
    AttentionCall call;
    CallContext context;
    CallMemory memory;
    double flops = 0;
    Ticket ticket = {};
    StagedTensors staged = {};  // after the ticket: its memory is back before the promise
    int64_t workspace_bytes = 0;
    int64_t input_bytes = 0;
    int64_t output_bytes = 0;
    bool keeps_on_device = false;
    absl::Time admitted_at = {};
    absl::Time latest_start = {};
  };
  AdmittedCall(AttentionCall call, CallContext context, CallMemory memory)
      : parts_(new Parts{
            .call = std::move(call), .context = std::move(context), .memory = std::move(memory)}) {}

  std::unique_ptr<Parts> parts_;
};

class Admission {
 public:
  // `reclaimer` may be null.
  Admission(const AdmissionLimits& limits, std::vector<AdmissionDevice> devices, const Clock& clock,
            MemoryReclaimer* reclaimer = nullptr);
  Admission(const AdmissionLimits& limits, const Backend& backend, const CostModel& cost,
            const Clock& clock, MemoryReclaimer* reclaimer = nullptr)
      : Admission(limits, {{&backend, &cost}}, clock, reclaimer) {}

  absl::StatusOr<AdmittedCall> Admit(AttentionCall call, CallContext context,
                                     CallMemory memory = {});

  // Staging memory for tensors of a call that is not admitted here, such as one of modules. It
  // counts as the caller's until the ticket goes. OUT_OF_RANGE TOO_LARGE_FOR_DEVICE, UNAVAILABLE
  // MEMORY_PRESSURE, RESOURCE_EXHAUSTED TENANT_QUOTA. Any thread.
  absl::StatusOr<Ticket> HoldStaging(const std::string& caller, int64_t bytes);
  // Whether the caller has more than half of its share of staging memory, or all callers have more
  // than half of what there is: those that wait for others of the caller's calls are in their way.
  bool HoldsOverHalf(const std::string& caller) const;
  // Memory of a device that calls do not get until the last copy of what is returned has gone.
  // UNAVAILABLE HBM_PRESSURE where calls, and leases too young to evict, leave no room. Any thread.
  absl::StatusOr<std::shared_ptr<void>> HoldDeviceMemory(int device, int64_t bytes);

  // From now on every call is refused with DRAINING.
  void StartDraining();
  // From now on the device gets no call. Without a device every call is refused with DEVICE_LOST.
  void Fence(int device);
  // The last refusal while draining; InfinitePast when there was none.
  absl::Time last_refused_at() const;
  AdmissionUse Use() const;
  AdmissionDeviceUse DeviceUse(int device) const;
  // The time that the device needs for all admitted calls.
  double QueueSeconds(int device) const;
  const AdmissionLimits& limits() const { return limits_; }

 private:
  // Says what the call would take of each device that can compute it.
  using Choices = absl::InlinedVector<DeviceChoice, 1>;
  absl::StatusOr<Choices> ChoicesOf(AdmittedCall& admitted) const;
  DeviceChoice ChoiceOf(AdmittedCall& admitted, int device) const;
  absl::Status Supports(const AttentionCall& call, int device) const;
  bool KeepsOnDevice(const AttentionCall& call, int device) const;
  // `take(in_the_way)`, again after leases in its way are evicted.
  absl::Status TakeEvicting(const std::function<absl::Status(LeasesInTheWay*)>& take);
  // Sets the sizes of the call's staging memory for that device; returns their sum.
  int64_t AddUpMemory(AdmittedCall& admitted, int device) const;
  absl::Status RefuseWhileDraining() const;
  absl::Status RefuseTooLarge(const AdmittedCall& call, const DeviceChoice& choice) const;
  absl::Status RefuseTooMuchStaging(int64_t bytes) const;

  const AdmissionLimits limits_;
  const std::vector<AdmissionDevice> devices_;
  const Clock& clock_;
  MemoryReclaimer* const reclaimer_;
  std::shared_ptr<AdmissionLedger> ledger_;  // shared with every ticket
};

}  // namespace attnd
