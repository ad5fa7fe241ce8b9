// ModuleClient: stacks of layers whose weights stay on a daemon.
//
//     Register(layout, options) → RemoteModule: Forward, Backward, Step, Put, Get
//
// It uses an AttentionClient's connections, credentials, deadlines and retries. A module lives at
// one address at a time. Any thread; the client outlives it and each of its modules.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/attention_client.h"
#include "client/modules/module_rpcs.h"
#include "client/modules/redo_log.h"
#include "client/modules/remote_module.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

struct ModuleRegistration {
  std::unique_ptr<RemoteModule> module;  // null after a dry run
  v1::RegisterModuleResponse reply;
};

class ModuleClient {
 public:
  static constexpr int64_t kReplayBytes = int64_t{512} << 20;

  // `address`: of its modules; −1: each where it has most room, and other calls are about address
  // 0.
  explicit ModuleClient(const AttentionClient& client, int address = -1)
      : core_(client.core()), address_(address) {}

  // `replay_bytes`: of calls that are kept for replay where the server does not keep their state.
  absl::StatusOr<ModuleRegistration> Register(const v1::RegisterModuleRequest& request,
                                              const CallOptions& options = {},
                                              int64_t replay_bytes = kReplayBytes);
  absl::StatusOr<v1::ListModulesResponse> List(const CallOptions& options = {});

  // Finds one of the caller's modules, whoever registered it. MODULE_LOST: none of that name.
  absl::StatusOr<v1::GetModuleResponse> Get(const std::string& name,
                                            const CallOptions& options = {});
  // Its weights and moments, all of one state, as they are kept.
  absl::StatusOr<std::vector<SentTensor>> Fetch(const std::string& token,
                                                const CallOptions& options = {});
  absl::Status Release(const std::string& token, const CallOptions& options = {});

 private:
  ModuleTry TryOf(const CallOptions& options) const;
  ModuleRpcs rpcs() const { return ModuleRpcs(core_, address_ < 0 ? 0 : address_); }

  const ClientCore& core_;
  const int address_;
};

}  // namespace attnd
