#include "client/modules/module_client.h"

#include <utility>

#include "base/status_macros.h"
#include "client/modules/module_rpcs.h"

namespace attnd {

absl::StatusOr<RegisteredModule> ModuleClient::Register(const v1::RegisterModuleRequest& request,
                                                        const CallOptions& options,
                                                        int64_t replay_bytes) {
  auto module = std::make_unique<RemoteModule>(core_, address_, request, replay_bytes);
  ASSIGN_OR_RETURN(v1::RegisterModuleResponse reply, module->Register(options));
  if (request.dry_run()) module = nullptr;
  return RegisteredModule{std::move(module), std::move(reply)};
}

absl::StatusOr<v1::ListModulesResponse> ModuleClient::List(const CallOptions& options) {
  v1::ListModulesResponse reply;
  absl::Duration timeout = options.timeout.value_or(core_.options.timeout);
  ModuleTry one{.deadline = core_.clock.Now() + timeout, .options = options, .pushback = {}};
  RETURN_IF_ERROR(ModuleRpcs(core_, address_).List(reply, one));
  return reply;
}

}  // namespace attnd
