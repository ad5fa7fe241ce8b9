// ModulesService: the gRPC methods of attnd.v1.Modules. All take and give raw bytes, so that no
// tensor passes through protobuf. A call has a place (kMaxModuleCalls, shared by FairShares), from
// its first whole message to the last byte of its reply, and a thread of its own until it has
// answered: most of its time is waiting, for its payloads, its turn and its peer. Threads: gRPC's;
// destroyed after the server has shut down.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/task_queue.h"
#include "proto/attnd/v1/module.grpc.pb.h"
#include "server/metrics/module_metrics.h"
#include "server/modules/call_stream.h"
#include "server/modules/module_calls.h"
#include "server/security/auth.h"

namespace attnd {

inline constexpr int kMaxModuleCalls = 64;
// A call does without, where there is no place.
inline constexpr int kMaxCarryStreams = 32;

using ModulesWithLife =
    v1::Modules::WithRawCallbackMethod_Register<v1::Modules::WithRawCallbackMethod_GetModule<
        v1::Modules::WithRawCallbackMethod_ListModules<v1::Modules::WithRawCallbackMethod_Renew<
            v1::Modules::WithRawCallbackMethod_Release<v1::Modules::Service>>>>>;
using ModulesServiceBase = v1::Modules::WithRawCallbackMethod_Forward<
    v1::Modules::WithRawCallbackMethod_Backward<v1::Modules::WithRawCallbackMethod_GradientStats<
        v1::Modules::WithRawCallbackMethod_SumGradients<
            v1::Modules::WithRawCallbackMethod_Step<v1::Modules::WithRawCallbackMethod_PutTensors<
                v1::Modules::WithRawCallbackMethod_GetTensors<
                    v1::Modules::WithRawCallbackMethod_Carry<
                        v1::Modules::WithRawCallbackMethod_ForwardWhole<
                            v1::Modules::WithRawCallbackMethod_BackwardWhole<
                                ModulesWithLife>>>>>>>>>>;

class ModulesService final : public ModulesServiceBase {
 public:
  // All outlive it.
  struct Deps {
    ModuleCalls& calls;
    StreamDeps streams;
    const Authenticator& auth;
    ModuleMetrics& metrics;
    Logger& log;
    absl::Duration longest;  // a call's deadline at most
  };
  explicit ModulesService(const Deps& deps)
      : deps_(deps), threads_(kMaxModuleCalls + kMaxCarryStreams) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  grpc::ServerUnaryReactor* Register(Context* context, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* GetModule(Context* context, const Bytes* request,
                                      Bytes* reply) override;
  grpc::ServerUnaryReactor* ListModules(Context* context, const Bytes* request,
                                        Bytes* reply) override;
  grpc::ServerUnaryReactor* Renew(Context* context, const Bytes* request, Bytes* reply) override;
  grpc::ServerUnaryReactor* Release(Context* context, const Bytes* request, Bytes* reply) override;
  grpc::ServerBidiReactor<Bytes, Bytes>* Forward(Context* context) override;
  grpc::ServerBidiReactor<Bytes, Bytes>* Backward(Context* context) override;
  grpc::ServerUnaryReactor* ForwardWhole(Context* context, const Bytes* request,
                                         Bytes* reply) override;
  grpc::ServerUnaryReactor* BackwardWhole(Context* context, const Bytes* request,
                                          Bytes* reply) override;
  grpc::ServerBidiReactor<Bytes, Bytes>* Carry(Context* context) override;
  grpc::ServerUnaryReactor* GradientStats(Context* context, const Bytes* request,
                                          Bytes* reply) override;
  grpc::ServerUnaryReactor* SumGradients(Context* context, const Bytes* request,
                                         Bytes* reply) override;
  grpc::ServerUnaryReactor* Step(Context* context, const Bytes* request, Bytes* reply) override;
  grpc::ServerReadReactor<Bytes>* PutTensors(Context* context, Bytes* reply) override;
  grpc::ServerWriteReactor<Bytes>* GetTensors(Context* context, const Bytes* request) override;

 private:
  UnaryStream* StartUnary(ModuleMethod method, Context* context, const Bytes* request,
                          Bytes* reply);
  void Start(ModuleMethod method, CallStream& stream);
  // Refuses a caller, or an address, that has as many calls as it may.
  absl::Status Enter(ModuleMethod method, CallStream& stream, const std::string& caller);
  BidiStream* StartBidi(ModuleMethod method, Context* context);
  WholeStream* StartWhole(ModuleMethod method, Context* context, const Bytes* request,
                          Bytes* reply);
  void Serve(ModuleMethod method, CallStream& stream, const std::string& caller);
  void Finish(ModuleMethod method, CallStream& stream, const std::string& caller,
              const absl::Status& status);

  void AddLoad(CallStream& stream, const std::string& caller);

  const Deps deps_;
  FairShares places_{kMaxModuleCalls}, carry_places_{kMaxCarryStreams};
  TaskQueue threads_;
};

}  // namespace attnd
