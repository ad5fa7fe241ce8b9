// Carry of a module: a further stream for the chunks of a Forward or Backward.
#include <memory>

#include "base/status_macros.h"
#include "server/modules/module_calls.h"

namespace attnd {

absl::Status ModuleCalls::Carry(ModuleCall& call) {
  const google::protobuf::Descriptor& type = *v1::ModuleCarryRequest::descriptor();
  v1::ModuleCarryHeader header;
  RETURN_IF_ERROR(ReadHeader(call.stream, type, header));
  RETURN_IF_ERROR(deps_.table.Find(header.token(), call.caller).status());
  RETURN_IF_ERROR(CheckCarry(header.carry()));
  const std::shared_ptr<Carriage> carriage = carriages_.Of(call.caller, header.carry());
  RETURN_IF_ERROR(carriage->AwaitAdmitted(call.wait));
  const bool begun =
      call.stream.Write(FramedHeader(v1::ModuleCarryResult())) && call.stream.Flush();
  const absl::Status brought =
      begun ? ReceiveCarried(call.stream, type, *carriage) : BrokenOr(call.stream, CallerIsGone());
  carriage->BroughtAll(brought);
  RETURN_IF_ERROR(brought);
  ASSIGN_OR_RETURN(const std::shared_ptr<LeavingChunks> chunks, carriage->AwaitLeaving(call.wait));
  return SendChunks(call.stream, *chunks);
}

}  // namespace attnd
