// ModuleRpcs: the calls of attnd.v1.Modules at one address, each tried once. It knows no state:
// RemoteModule names sequences, tries again and recovers. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/call/client_core.h"
#include "client/call/unary_call.h"
#include "client/channels/grpc_status.h"
#include "client/modules/redo_log.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

// Deadline and cancellation of one try, and what the server wished of the next.
struct ModuleTry {
  absl::Time deadline;
  const CallOptions& options;
  Pushback pushback;
  bool was_paused = false;  // stopped by this client, to be tried again at once
};

struct BackwardOutputsOfModule {
  absl::Span<std::byte> d_memory, dx;  // empty: not wanted
};

class ModuleRpcs {
 public:
  // `name`: of the module, in the metadata of each call, by which a proxy keeps its calls at one
  // daemon; empty: of no module. `carry_streams`, `whole_bytes`: as RegisterModuleResponse has
  // them.
  ModuleRpcs(const ClientCore& core, int address, const std::string& name = "",
             int carry_streams = 0, int64_t whole_bytes = 0)
      : core_(core), address_(address), carry_streams_(carry_streams), whole_bytes_(whole_bytes) {
    if (!name.empty()) metadata_.emplace_back("attnd-module", name);
  }

  const ClientCore& core() const { return core_; }

  absl::Status Register(const v1::RegisterModuleRequest& request, v1::RegisterModuleResponse& reply,
                        ModuleTry& attempt) const;
  absl::Status GetModule(const v1::GetModuleRequest& request, v1::GetModuleResponse& reply,
                         ModuleTry& attempt) const;
  absl::Status List(v1::ListModulesResponse& reply, ModuleTry& attempt) const;
  absl::Status Release(const std::string& token, ModuleTry& attempt) const;
  absl::Status ReleaseActivations(const std::string& token, ModuleTry& attempt) const;
  absl::Status SumGradients(const v1::SumGradientsRequest& request, v1::SumGradientsResponse& reply,
                            ModuleTry& attempt) const;
  absl::Status GradientStats(const v1::GradientStatsRequest& request,
                             v1::GradientStatsResponse& reply, ModuleTry& attempt) const;
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse& reply,
                    ModuleTry& attempt) const;

  // The header's payload sizes are filled in here.
  absl::Status Forward(v1::ModuleForwardHeader header, const SentForward& inputs,
                       absl::Span<std::byte> y, v1::ModuleForwardResult& result,
                       ModuleTry& attempt) const;
  // `inputs`: null where the header names activations.
  absl::Status Backward(v1::ModuleBackwardHeader header, const SentForward* inputs,
                        const KeptBytes& dy, const BackwardOutputsOfModule& out,
                        v1::ModuleBackwardResult& result, ModuleTry& attempt) const;
  absl::Status Put(const v1::PutTensorsHeader& header, const SentPut& put,
                   v1::PutTensorsResponse& reply, ModuleTry& attempt) const;
  // Where a tensor of the reply goes; an error ends the call, an empty span leaves the tensor out.
  using Place = std::function<absl::StatusOr<absl::Span<std::byte>>(const v1::TensorHeader&)>;
  absl::Status Get(const v1::GetTensorsRequest& request, const Place& place,
                   ModuleTry& attempt) const;

 private:
  struct Exchanged;
  absl::Status Unary(const char* method, const google::protobuf::MessageLite& request,
                     google::protobuf::MessageLite& reply, ModuleTry& attempt) const;
  template <class Header, class Result>
  absl::Status Stream(Exchanged call, Header& header, Result& result, ModuleTry& attempt) const;
  template <class Header, class Result>
  absl::Status Whole(Exchanged call, const Header& header, Result& result,
                     ModuleTry& attempt) const;
  template <class Header, class Result>
  absl::Status Send(Exchanged call, Header& header, Result& result, ModuleTry& attempt) const;
  template <class Header, class Result>
  absl::Status Exchange(Exchanged call, Header header, Result& result, ModuleTry& attempt) const;

  const ClientCore& core_;
  const int address_, carry_streams_;
  const int64_t whole_bytes_;
  CallMetadata metadata_;
};

}  // namespace attnd
