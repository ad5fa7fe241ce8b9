// Admission: decides from a decoded call, before a byte of it is copied, whether this server will
// run it, and keeps memory and time for it while its Ticket lives.
//
//   larger than the budget can ever hold → OUT_OF_RANGE     full now → UNAVAILABLE with RetryInfo
//   the caller's own quota → RESOURCE_EXHAUSTED             too late already → DEADLINE_EXCEEDED
//   what the engine cannot run → UNIMPLEMENTED              draining → UNAVAILABLE
//
// With several devices a call goes to the one that will have finished it first, by estimate, among
// those that have the memory; its Ticket keeps that device's memory and time. A backward on a
// residual goes to the device that holds it and to no other, however long it has to wait there.
// Leases count against the memory too, but give way: they are evicted before a call is refused.
// "Full" looks at the work ahead of a call, not at the call itself: a single call of any length is
// taken by an idle server, and the wait in front of it never exceeds max_queue_seconds.
// "Too late" looks at what the batcher will do before it: of others' work their share, so that a
// caller whose long queue is his own stands in nobody's way.
// Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "kernels/backend.h"
#include "server/call.h"
#include "server/cost_model.h"
#include "server/staged_tensors.h"

namespace attnd {

class ReplySink;

struct AdmissionLimits {
  int64_t memory_bytes = int64_t{1} << 30;  // staging of inputs, workspace and outputs together
  int64_t max_calls = 1024;                 // admitted and not yet computed
  double max_queue_seconds = 30;            // estimated work ahead of a new call
  int64_t caller_max_calls = 1024;          // of max_calls, by one caller
  int64_t caller_max_bytes = int64_t{1} << 30;
  int64_t max_reply_bytes = int64_t{16} << 20;
  absl::Duration max_deadline = absl::Minutes(10);  // of a call that brings none, or a later one
};

// A device that calls may be admitted to; what is pointed to outlives Admission.
struct AdmissionDevice {
  const Backend* backend = nullptr;
  const CostModel* cost = nullptr;
};

// What admitted calls will need of one device; seconds as CostModel estimates them, not at its
// pace.
struct AdmissionDeviceUse {
  int64_t calls = 0;
  int64_t memory_bytes = 0;  // of BackendInfo::memory_bytes
  int64_t lease_bytes = 0;   // of what calls left behind there; of that memory too
  double seconds = 0;
};

// A snapshot for metrics.
struct AdmissionUse {
  int64_t calls = 0;
  int64_t bytes = 0;        // of calls, until their reply is sent
  int64_t lease_bytes = 0;  // of what calls left behind; of memory_bytes too
  double seconds = 0;
};

// Who can give back memory that was kept as a favour: at a place, a device's number or kHostMemory.
// Any thread.
class MemoryReclaimer {
 public:
  virtual ~MemoryReclaimer() = default;
  // Tries to free `bytes`; gives how many it freed.
  virtual int64_t Reclaim(int place, int64_t bytes) = 0;
  // Frees one piece, even if it is young; false when there is none.
  virtual bool EvictOne(int place) = 0;
};

class AdmissionLedger;

// The calls that the batcher serves one after the other, by one weight.
struct CallerFlow {
  std::string caller;
  Priority priority = Priority::kNormal;

  friend bool operator==(const CallerFlow&, const CallerFlow&) = default;
  template <class Hash>
  friend Hash AbslHashValue(Hash hash, const CallerFlow& flow) {
    return Hash::combine(std::move(hash), flow.caller, flow.priority);
  }
};

// Ticket: a promise that bytes of staging memory, and bytes and seconds of one device, are kept for
// one call.
// Destroying it gives both back, so that no path, error and cancel included, can leak budget. It
// may outlive the server inside a reply's slices. Any thread, one at a time; move-only.
class Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&& other) noexcept { *this = std::move(other); }
  Ticket& operator=(Ticket&& other) noexcept;
  ~Ticket();

  int64_t bytes() const { return bytes_; }
  double seconds() const { return seconds_; }
  int device() const { return device_; }
  // The device is done with the call: its memory, its time and its place in the queue are free.
  void ReleaseWork();
  // Keeps `bytes` of the memory and gives the rest back.
  void ShrinkTo(int64_t bytes);
  // ReleaseWork, ShrinkTo, and from now on the bytes are a lease's: no longer the caller's quota's,
  // but still of the memory.
  void BecomeLease(int64_t bytes);
  // Takes `bytes` of the device's memory out of what is kept for the call, before ReleaseWork, and
  // gives the ticket of a lease that keeps them on.
  Ticket LeaseDeviceMemory(int64_t bytes);

 private:
  friend class Admission;
  void EndDeviceLease();

  std::shared_ptr<AdmissionLedger> ledger_;  // shared with Admission and every other ticket
  CallerFlow flow_;
  int64_t bytes_ = 0;
  int device_ = 0;
  int64_t device_bytes_ = 0;
  int64_t device_lease_bytes_ = 0;
  double seconds_ = 0;
  bool working_ = false;
  bool lease_ = false;
};

// Who calls, and until when the answer matters.
struct CallContext {
  uint64_t id = 0;  // unique in this process
  std::string caller;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time received_at;
  ReplySink* sink = nullptr;  // answered exactly once
  bool streamed = false;      // the reply is no single message, so it has no limit of its own
};

// AdmittedCall: a call and its Ticket: memory and time are kept for it while it lives. Made only by
// Admission; move-only, and as small as a pointer.
class AdmittedCall {
 public:
  AdmittedCall(AdmittedCall&&) = default;
  AdmittedCall& operator=(AdmittedCall&&) = default;

  const AttentionCall& call() const { return parts_->call; }
  AttentionCall& call() { return parts_->call; }
  const CallMemory& memory() const { return parts_->memory; }
  // The engine is done with it.
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
  absl::Time admitted_at() const { return parts_->admitted_at; }

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
    absl::Time admitted_at = {};
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

  // From now on every call is refused with DRAINING.
  void StartDraining();
  // From now on no call goes to this device; when none is left, every call is refused with
  // DEVICE_LOST.
  void Fence(int device);
  // When the last one was; InfinitePast when none was.
  absl::Time last_refused_at() const;
  AdmissionUse Use() const;
  AdmissionDeviceUse DeviceUse(int device) const;
  // How long the device will need for all that is admitted to it.
  double QueueSeconds(int device) const;
  const AdmissionLimits& limits() const { return limits_; }

 private:
  // What a call takes of each device that can run it.
  struct Choice {
    int device = 0;
    int64_t device_bytes = 0;
    double seconds = 0;
  };
  absl::StatusOr<Choice> Choose(const AdmittedCall& call) const;
  Choice ChoiceOf(const AdmittedCall& call, int device) const;
  absl::Status Take(const CallerFlow& flow, int64_t bytes, const Choice& choice);
  // Sums the call's staging memory, in its parts, and gives the total.
  static int64_t AddUpMemory(AdmittedCall& admitted, const Backend& backend);
  absl::Status RefuseWhileDraining() const;
  absl::Status RefuseTooLarge(const AdmittedCall& call, int64_t bytes, const Choice& choice) const;
  absl::Status RefuseLate(const AdmittedCall& call, const CallerFlow& flow, const Choice& choice,
                          absl::Time now) const;

  const AdmissionLimits limits_;
  const std::vector<AdmissionDevice> devices_;
  const Clock& clock_;
  MemoryReclaimer* const reclaimer_;
  std::shared_ptr<AdmissionLedger> ledger_;  // shared with every ticket
};

}  // namespace attnd
