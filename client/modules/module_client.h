// ModuleClient: stacks of layers whose weights stay on a daemon.
//
//     Register(layout, options) → RemoteModule: Forward, Backward, Step, Put, Get
//
// It uses an AttentionClient's connections, credentials, deadlines and retries. A module lives at
// one address; others of the client's are not asked. Any thread; the client outlives it and each of
// its modules.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/attention_client.h"
#include "client/modules/remote_module.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

struct RegisteredModule {
  std::unique_ptr<RemoteModule> module;  // null after a dry run
  v1::RegisterModuleResponse reply;
};

class ModuleClient {
 public:
  static constexpr int64_t kReplayBytes = int64_t{512} << 20;

  explicit ModuleClient(const AttentionClient& client, int address = 0)
      : core_(client.core()), address_(address) {}

  // `replay_bytes`: of calls that are kept for replay where the server does not keep their state.
  absl::StatusOr<RegisteredModule> Register(const v1::RegisterModuleRequest& request,
                                            const CallOptions& options = {},
                                            int64_t replay_bytes = kReplayBytes);
  absl::StatusOr<v1::ListModulesResponse> List(const CallOptions& options = {});

 private:
  const ClientCore& core_;
  const int address_;
};

}  // namespace attnd
