#include "client/modules/module_client.h"

#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "client/modules/module_tensors.h"

namespace attnd {

absl::StatusOr<ModuleRegistration> ModuleClient::Register(const v1::RegisterModuleRequest& request,
                                                          const CallOptions& options,
                                                          int64_t replay_bytes) {
  auto module = std::make_unique<RemoteModule>(core_, address_, request, replay_bytes);
  ASSIGN_OR_RETURN(v1::RegisterModuleResponse reply, module->Register(options));
  if (request.dry_run()) module = nullptr;
  return ModuleRegistration{std::move(module), std::move(reply)};
}

ModuleTry ModuleClient::TryOf(const CallOptions& options) const {
  const absl::Duration timeout = options.timeout.value_or(core_.options.timeout);
  return {.deadline = core_.clock.Now() + timeout, .options = options, .pushback = {}};
}

absl::StatusOr<v1::ListModulesResponse> ModuleClient::List(const CallOptions& options) {
  v1::ListModulesResponse reply;
  ModuleTry one = TryOf(options);
  RETURN_IF_ERROR(rpcs().List(reply, one));
  return reply;
}

absl::StatusOr<v1::GetModuleResponse> ModuleClient::Get(const std::string& name,
                                                        const CallOptions& options) {
  v1::GetModuleRequest request;
  request.set_name(name);
  v1::GetModuleResponse reply;
  ModuleTry one = TryOf(options);
  RETURN_IF_ERROR(rpcs().GetModule(request, reply, one));
  return reply;
}

absl::StatusOr<std::vector<SentTensor>> ModuleClient::Fetch(const std::string& token,
                                                            const CallOptions& options) {
  ModuleTry one = TryOf(options);
  return FetchTensors(rpcs(), token, std::nullopt, one);
}

absl::Status ModuleClient::Release(const std::string& token, const CallOptions& options) {
  ModuleTry one = TryOf(options);
  return rpcs().Release(token, one);
}

}  // namespace attnd
