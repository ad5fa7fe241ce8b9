// ModuleCalls: what each method of the service Modules does, from its first message to its last.
//
//   header → the module by its token → checks that need no payload → payloads → the module's turn
//   (RegisteredModule) → the device's turn (ComputeTurns) → engine → what was done is noted → reply
//
// Each runs on a thread that may wait. Threads: any, one for each call.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "modules/module_engine.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/admission/staging_pool.h"
#include "server/metrics/module_metrics.h"
#include "server/modules/call_stream.h"
#include "server/modules/compute_turns.h"
#include "server/modules/device_turns.h"
#include "server/modules/module_table.h"
#include "server/modules/payloads.h"
#include "server/modules/running_digest.h"
#include "server/modules/state_root.h"
#include "server/rpc/call_log_limit.h"

namespace attnd {

// When a call passed the ends of its stages; the infinite past where it has not.
struct ModuleTimes {
  absl::Time began = absl::InfinitePast();     // its first message was there
  absl::Time admitted = absl::InfinitePast();  // checked, with memory for its tensors
  absl::Time landed = absl::InfinitePast();    // its tensors are there
  absl::Time turn = absl::InfinitePast();      // it has its module and devices
  absl::Time computed = absl::InfinitePast();
  absl::Time saved = absl::InfinitePast();  // the module's state
  TransferSeconds transfers;                // between turn and computed
};

// A call: its stream, and who asks.
struct ModuleCall {
  CallStream& stream;
  std::string caller;
  CallWait wait;
  absl::Duration compute;  // the device's time that it has taken
  ModuleTimes times;
};

class ModuleCalls {
 public:
  // All outlive it. `devices`: what receipts and metrics call the engine's.
  struct Deps {
    ModuleTable& table;
    ModuleEngine& engine;
    Admission& admission;
    StagingPool& staging;
    MemoryReclaimer* leases;  // in staging memory; null: there are none
    SharedMemoryTable& shared_memory;
    ModuleMetrics& metrics;
    std::vector<std::string> devices;
    absl::Duration activation_ttl, max_activation_ttl;
    StateRoot* states;          // of what outlives the process; null: that is not offered
    CallLogLimit& state_lines;  // about states
    absl::Duration save_every;
    int64_t shadow_every;
    Logger& log;
  };
  explicit ModuleCalls(const Deps& deps) : deps_(deps), turns_(deps.devices.size()) {}

  // Estimated work of the calls that wait for this device or compute there.
  double QueueSeconds(int device) const { return turns_[device].QueueSeconds(); }

  absl::Status Run(ModuleMethod method, ModuleCall& call);
  // From now on no new work: Register, Forward, Backward and PutTensors are DRAINING. A step that
  // has begun goes on where its caller comes again, who cannot take the gradients elsewhere then.
  void StartDraining() { draining_ = true; }
  const ModuleMemory& memory() const { return deps_.table.memory(); }
  int device_count() const { return static_cast<int>(deps_.devices.size()); }
  // When a call that computes on the device counts as stuck.
  absl::Time stuck_at(int device) const { return turns_[device].stuck_at(); }

 private:
  using Module = std::shared_ptr<RegisteredModule>;

  // life_calls.cc
  absl::Status Register(ModuleCall& call);
  // An instance that `record` describes, with its plan, and its memory in `reserved`.
  absl::StatusOr<std::unique_ptr<ModuleInstance>> MakeInstance(
      ModuleRecord& record, std::shared_ptr<const ModuleDescription> description,
      ModuleMemory::Reservation& reserved);
  absl::StatusOr<Module> MakeModule(ModuleRecord record, v1::Durability durability,
                                    std::shared_ptr<const ModuleDescription> description);
  absl::Status CheckDurability(v1::Durability durability) const;
  absl::StatusOr<std::unique_ptr<ModuleState>> OpenState(
      const ModuleRecord& record, v1::Durability durability,
      const ModuleDescription& description) const;
  // A limited number of lines.
  void WarnOfState(absl::string_view event, const absl::Status& status,
                   absl::string_view cure) const;
  // For the caller and, where it is for the operator to see, the log.
  absl::Status StateRefused(const absl::Status& status) const;
  absl::Status GetModule(ModuleCall& call);
  absl::Status ListModules(ModuleCall& call);
  absl::Status Renew(ModuleCall& call);
  absl::Status Release(ModuleCall& call);

  // forward_call.cc
  absl::Status Forward(ModuleCall& call);
  absl::Status Carry(ModuleCall& call);
  absl::Time ActivationsExpire(const v1::CallOptions& options) const;

  // backward_call.cc
  absl::Status Backward(ModuleCall& call);
  struct Gradient;
  absl::Status Differentiate(ModuleCall& call, Gradient& gradient);
  absl::StatusOr<ActivationId> Recompute(RegisteredModule::Hold& hold, Gradient& gradient,
                                         ModuleCall& call, DeviceYield& yield);

  // step_calls.cc
  absl::Status GradientStatsOf(ModuleCall& call);
  absl::Status FillStats(const RegisteredModule& module, ModuleInstance& instance,
                         const v1::GradientStatsRequest& request,
                         v1::GradientStatsResponse& response);
  absl::Status Step(ModuleCall& call);
  absl::StatusOr<v1::StepResponse> Apply(RegisteredModule::Hold& hold,
                                         const v1::StepRequest& request);
  absl::Status SumGradients(ModuleCall& call);
  absl::StatusOr<std::string> NewGroup(RegisteredModule& module,
                                       const v1::SumGradientsRequest& request,
                                       const CallWait& wait);
  // Takes memory for sums of so many replicas, which the module has from then on.
  absl::Status PrepareReplicas(const RegisteredModule& module, RegisteredModule::Hold& hold,
                               int replicas);

  // tensor_calls.cc
  absl::Status PutTensors(ModuleCall& call);
  struct SentTensors;
  // False: it has been done before.
  absl::StatusOr<bool> ReplaceGradients(ModuleCall& call, SentTensors& sent);
  absl::StatusOr<bool> ChangeState(ModuleCall& call, SentTensors& sent);
  absl::Status GetTensors(ModuleCall& call);

  absl::Status CheckNotDraining() const;
  // For a call that computes.
  absl::Status CheckServes(const std::string& token, const std::string& caller) const;
  PayloadMemory MemoryOf(const ModuleCall& call) {
    return {deps_.admission,     deps_.staging, deps_.leases,
            deps_.shared_memory, carriages_,    call.caller};
  }
  // Returns the turns of the devices that the module is on.
  std::vector<ComputeTurns*> TurnsOf(const RegisteredModule& module);
  // Its turn at each of them; `seconds`: estimated, 0: not known.
  absl::StatusOr<std::unique_ptr<DeviceTurns>> TakeDevices(ModuleCall& call,
                                                           const RegisteredModule& module,
                                                           double seconds = 0);
  // Before payloads are read: DEADLINE_EXCEEDED DEADLINE_UNMEETABLE.
  absl::Status RefuseLate(const ModuleCall& call, const RegisteredModule& module, double seconds);
  // Notes a Forward or Backward in the metrics, once it has been computed. Its receipt.
  v1::Receipt Computed(const RegisteredModule& module, bool is_forward, int64_t rows,
                       const ModuleCall& call) const;
  absl::StatusOr<EnginePlan> PlanWithin(const ModuleDescription& description,
                                        const ModuleLimits& limits,
                                        const std::string& caller) const;
  std::vector<std::string> NamesOf(const EnginePlan& plan) const;  // each once

  const Deps deps_;
  const PayloadDigests payload_digests_;
  Carriages carriages_;
  absl::Mutex making_;  // one at a time: what a plan finds free is free, and nobody else measures
  std::deque<ComputeTurns> turns_;  // [devices]
  std::atomic<bool> draining_{false};
};

// Digests the bytes of a message, the same for equal messages: 32 bytes.
std::string DigestOf(const google::protobuf::Message& message);

// Rows of a call, checked against the module: INVALID_ARGUMENT "rows...".
absl::StatusOr<CallRows> DecodeCallRows(const v1::Rows& wire, const RegisteredModule& module);

// The layers that a call runs: INVALID_ARGUMENT "first_layer", "end_layer".
absl::StatusOr<LayerRange> DecodeLayers(const v1::ModuleForwardHeader& header,
                                        const ModuleGraph& graph);

// Payloads that rows and the range's first layer imply, in order.
std::vector<PayloadSpec> ForwardInputs(const ModuleGraph& graph, const CallRows& rows,
                                       int64_t first_layer);
// Counts the bytes of x, y, dx, dy, where they pass the border before `layer`.
int64_t ActivationBytes(const ModuleGraph& graph, const CallRows& rows, int64_t layer);

// A framed message of one part.
grpc::ByteBuffer FramedHeader(const google::protobuf::Message& header);

}  // namespace attnd
