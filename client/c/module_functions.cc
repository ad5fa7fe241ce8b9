#include <google/protobuf/util/json_util.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "client/c/attnd_client.h"
#include "client/c/call.h"
#include "client/c/conversions.h"
#include "client/c/handles.h"
#include "client/modules/module_client.h"

struct attnd_module {
  std::unique_ptr<attnd::RemoteModule> module;
};
struct attnd_activations {
  attnd::RemoteModule& module;
  std::unique_ptr<attnd::RemoteModule::Activations> activations;
  mutable bool spent = false;  // a backward has used them
};

namespace attnd {
namespace {

template <class Message>
absl::Status Parse(const char* name, const void* bytes, int64_t size, Message& message) {
  if (size >= 0 && size <= INT32_MAX && message.ParseFromArray(bytes, static_cast<int>(size))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": expected a serialized ", message.GetTypeName(), ", got other bytes"));
}

// With the proto's field names, and defaults too. Numbers of 64 bits are strings in it.
std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  return google::protobuf::util::MessageToJsonString(message, &json, options).ok() ? json : "{}";
}

template <class Message>
void SetResult(attnd_call& call, Message message) {
  call.SetResult([message = std::move(message)] { return Json(message); });
}

template <class Message>
absl::Status Finish(attnd_call& call, absl::StatusOr<Message> message) {
  RETURN_IF_ERROR(message.status());
  SetResult(call, *std::move(message));
  return absl::OkStatus();
}

absl::Span<const std::byte> Bytes(const void* data, int64_t bytes) {
  return {static_cast<const std::byte*>(data), static_cast<size_t>(data == nullptr ? 0 : bytes)};
}
absl::Span<std::byte> Bytes(void* data, int64_t bytes) {
  return {static_cast<std::byte*>(data), static_cast<size_t>(data == nullptr ? 0 : bytes)};
}

absl::Status RunRegister(attnd_client& client, const void* request, int64_t bytes,
                         int64_t replay_bytes, attnd_call& call,
                         std::unique_ptr<RemoteModule>& module) {
  v1::RegisterModuleRequest parsed;
  RETURN_IF_ERROR(Parse("request", request, bytes, parsed));
  ASSIGN_OR_RETURN(ModuleRegistration made,
                   ModuleClient(*client.client)
                       .Register(parsed, call.MakeCallOptions(),
                                 replay_bytes < 0 ? ModuleClient::kReplayBytes : replay_bytes));
  module = std::move(made.module);
  made.reply.clear_token();  // bytes that are nobody's but this library's
  SetResult(call, std::move(made.reply));
  return absl::OkStatus();
}

absl::Status RunModuleForward(attnd_module& module, const attnd_module_forward_tensors& t,
                              attnd_call& call) {
  v1::ModuleForwardHeader header;
  RETURN_IF_ERROR(Parse("header", t.header, t.header_bytes, header));
  const ForwardInputsOfModule in{.x = Bytes(t.x, t.x_bytes),
                                 .memory = Bytes(t.memory, t.memory_bytes),
                                 .mask_bits = Bytes(t.mask_bits, t.mask_bits_bytes)};
  std::unique_ptr<RemoteModule::Activations> kept;
  RETURN_IF_ERROR(module.module->Forward(header, in, Bytes(t.y, t.x_bytes), call.MakeCallOptions(),
                                         t.keep == nullptr ? nullptr : &kept));
  if (t.keep != nullptr) *t.keep = new attnd_activations{*module.module, std::move(kept)};
  return absl::OkStatus();
}

absl::Status RunModuleBackward(attnd_module& module, const attnd_module_backward_tensors& t,
                               attnd_call& call) {
  if (t.activations == nullptr || &t.activations->module != module.module.get()) {
    return absl::InvalidArgumentError(
        "activations: expected those of a forward of this module, got others");
  }
  RETURN_IF_ERROR(module.module->Backward(
      *t.activations->activations, Bytes(t.dy, t.dy_bytes), t.no_weight_gradients != 0,
      {.d_memory = Bytes(t.d_memory, t.d_memory_bytes), .dx = Bytes(t.dx, t.dy_bytes)},
      call.MakeCallOptions(), t.turn));
  t.activations->spent = true;
  return absl::OkStatus();
}

absl::Status RunStep(attnd_module& module, const void* request, int64_t bytes, attnd_call& call) {
  v1::StepRequest parsed;
  RETURN_IF_ERROR(Parse("request", request, bytes, parsed));
  return Finish(call, module.module->Step(std::move(parsed), call.MakeCallOptions()));
}

absl::Status RunSumGradients(attnd_module& module, const void* request, int64_t bytes,
                             attnd_call& call) {
  v1::SumGradientsRequest parsed;
  RETURN_IF_ERROR(Parse("request", request, bytes, parsed));
  return Finish(call, module.module->SumGradients(std::move(parsed), call.MakeCallOptions()));
}

std::vector<SentTensor> SentOf(absl::Span<const attnd_module_tensor> tensors) {
  std::vector<SentTensor> made;
  for (const attnd_module_tensor& tensor : tensors) {
    SentTensor sent;
    sent.header.set_kind(static_cast<v1::TensorKind>(tensor.kind));
    sent.header.set_name(tensor.name);
    sent.header.set_element(static_cast<v1::Element>(tensor.element));
    for (int32_t n = 0; n < tensor.dimensions; ++n) {
      sent.header.add_shape(static_cast<uint32_t>(tensor.shape[n]));
    }
    sent.bytes =
        std::make_shared<const std::string>(static_cast<const char*>(tensor.data), tensor.bytes);
    made.push_back(std::move(sent));
  }
  return made;
}

absl::Status RunPut(attnd_module& module, absl::Span<const attnd_module_tensor> tensors,
                    int64_t optimizer_step, bool complete, attnd_call& call) {
  SentPut put{.tensors = SentOf(tensors), .commit = {}};
  if (optimizer_step >= 0) put.commit.set_optimizer_step(optimizer_step);
  put.commit.set_complete(complete);
  return module.module->Put(std::move(put), call.MakeCallOptions());
}

absl::Status RunGet(attnd_module& module, absl::Span<const attnd_module_tensor> tensors,
                    attnd_call& call) {
  std::vector<RemoteModule::TensorPlace> places;
  for (const attnd_module_tensor& tensor : tensors) {
    places.push_back(
        {static_cast<v1::TensorKind>(tensor.kind), tensor.name, Bytes(tensor.data, tensor.bytes)});
  }
  return module.module->Get(places, call.MakeCallOptions());
}

}  // namespace
}  // namespace attnd

using attnd::FullStructure;

attnd_module* attnd_module_register(attnd_client* client, const void* request,
                                    int64_t request_bytes, int64_t replay_bytes, attnd_call* call) {
  auto made = std::make_unique<attnd_module>();
  const int code = call->Run([&] {
    return attnd::RunRegister(*client, request, request_bytes, replay_bytes, *call, made->module);
  });
  return code == ATTND_OK && made->module != nullptr ? made.release() : nullptr;
}

void attnd_module_keep_snapshots(attnd_module* module, uint64_t every) {
  module->module->KeepSnapshots(every);
}

int attnd_module_is_recoverable(attnd_module* module) {
  return module->module->IsRecoverable() ? 1 : 0;
}

void attnd_module_free(attnd_module* module) { delete module; }

int attnd_module_release(attnd_module* module, attnd_call* call) {
  return call->Run([&] { return module->module->Release(call->MakeCallOptions()); });
}

int attnd_module_status(attnd_module* module, attnd_call* call) {
  return call->Run(
      [&] { return attnd::Finish(*call, module->module->GetStatus(call->MakeCallOptions())); });
}

int attnd_module_list(attnd_client* client, attnd_call* call) {
  return call->Run([&] {
    return attnd::Finish(*call, attnd::ModuleClient(*client->client).List(call->MakeCallOptions()));
  });
}

int attnd_module_join(attnd_module* module, int32_t rank, int32_t ranks, attnd_call* call) {
  return call->Run([&] {
    return module->module->Join(static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks));
  });
}

int attnd_module_follow(attnd_module* module, attnd_call* call) {
  return call->Run([&] { return module->module->Follow(call->MakeCallOptions()); });
}

uint64_t attnd_module_sequence(const attnd_module* module) { return module->module->sequence(); }
uint32_t attnd_module_micro_batches(const attnd_module* module) {
  return module->module->micro_batches();
}

uint64_t attnd_module_reserve_turn(attnd_module* module) { return module->module->ReserveTurn(); }
void attnd_module_give_up_turn(attnd_module* module, uint64_t turn) {
  module->module->GiveUpTurn(turn);
}

int attnd_module_forward(attnd_module* module, const attnd_module_forward_tensors* tensors,
                         attnd_call* call) {
  attnd_module_forward_tensors full = FullStructure(*tensors);
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("tensors", *tensors));
    return attnd::RunModuleForward(*module, full, *call);
  });
}

int attnd_module_backward(attnd_module* module, const attnd_module_backward_tensors* tensors,
                          attnd_call* call) {
  attnd_module_backward_tensors full = FullStructure(*tensors);
  return call->Run([&]() -> absl::Status {
    RETURN_IF_ERROR(attnd::CheckHasSize("tensors", *tensors));
    return attnd::RunModuleBackward(*module, full, *call);
  });
}

void attnd_activations_free(attnd_activations* activations) {
  if (activations == nullptr) return;
  if (!activations->spent) activations->module.Drop(*activations->activations);
  delete activations;
}

int attnd_module_gradient_stats(attnd_module* module, attnd_call* call) {
  return call->Run(
      [&] { return attnd::Finish(*call, module->module->GradientStats(call->MakeCallOptions())); });
}

int attnd_module_parameter_stats(attnd_module* module, int32_t all_norms, attnd_call* call) {
  return call->Run([&] {
    return attnd::Finish(
        *call, module->module->GradientStats(call->MakeCallOptions(), true, all_norms != 0));
  });
}

int attnd_module_step(attnd_module* module, const void* request, int64_t request_bytes,
                      attnd_call* call) {
  return call->Run([&] { return attnd::RunStep(*module, request, request_bytes, *call); });
}

int attnd_module_sum_gradients(attnd_module* module, const void* request, int64_t request_bytes,
                               attnd_call* call) {
  return call->Run([&] { return attnd::RunSumGradients(*module, request, request_bytes, *call); });
}

int attnd_module_put(attnd_module* module, const attnd_module_tensor* tensors, int64_t count,
                     int64_t optimizer_step, int32_t complete, attnd_call* call) {
  return call->Run([&] {
    return attnd::RunPut(*module, {tensors, static_cast<size_t>(count)}, optimizer_step,
                         complete != 0, *call);
  });
}

int attnd_module_put_gradients(attnd_module* module, const attnd_module_tensor* tensors,
                               int64_t count, attnd_call* call) {
  return call->Run([&] {
    return module->module->PutGradients(
        {.tensors = attnd::SentOf({tensors, static_cast<size_t>(count)}), .commit = {}},
        call->MakeCallOptions());
  });
}

int attnd_module_get(attnd_module* module, const attnd_module_tensor* tensors, int64_t count,
                     attnd_call* call) {
  return call->Run([&] {
    return attnd::RunGet(*module, {tensors, static_cast<size_t>(count)}, *call);
  });
}
