// Modules of a daemon with several devices: layers go where they wish, no bit depends on it, and
// what lies on a device that is lost is lost with it.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/device.h"
#include "modules/reference/reference_engine.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr int64_t kModuleMemory = int64_t{8} << 20;

ServerOptions TwoDeviceOptions() {
  ServerOptions options = TestOptions();
  options.modules.memory = {kModuleMemory, kModuleMemory};
  return options;
}

std::unique_ptr<Daemon> References(int count) {
  std::vector<Device> devices;
  for (int n = 0; n < count; ++n) devices.push_back(ReferenceDevice());
  return std::make_unique<Daemon>(std::move(devices), TwoDeviceOptions());
}

// Layers without a wish: −1.
v1::RegisterModuleRequest Registration(const std::string& name, const std::vector<int>& wishes) {
  v1::RegisterModuleRequest request = SmallRegistration(name, 0.5f);
  for (int n = 0; n < 2; ++n) {
    if (wishes[n] >= 0) request.mutable_layout()->mutable_layer(n)->set_device(wishes[n]);
  }
  return request;
}

std::vector<std::string> DevicesOf(const v1::ModuleStatus& status) {
  return {status.device().begin(), status.device().end()};
}

struct Trained {
  v1::RegisterModuleResponse registered;
  std::string receipt_device;
  std::string y, dx;
  double squared_norm = 0;
  std::map<std::string, std::string> tensors;
};

// A step of two micro-batches.
Trained Train(Daemon& daemon, const std::vector<int>& wishes) {
  ModuleCaller caller(daemon.NewChannel());
  Random random(3);
  Trained trained;
  const grpc::Status status = caller.Register(Registration("m", wishes), trained.registered);
  EXPECT_TRUE(status.ok()) << status.error_message();
  const std::string& token = trained.registered.token();
  v1::PutTensorsResponse put;
  EXPECT_TRUE(
      caller
          .Put(PutMessages(token, 0, [&](int64_t count) { return RandomBytes(random, count); }),
               put)
          .ok());
  for (uint32_t n = 0; n < 2; ++n) {
    const std::string x = RandomBytes(random, 4 * kModuleWidth);
    v1::ModuleForwardHeader forward = ForwardHeader(token, 1, 4, true);
    forward.set_offset(n);
    const auto kept = caller.Forward(forward, {{kX, x}});
    EXPECT_TRUE(kept.status.ok()) << kept.status.error_message();
    trained.receipt_device = kept.header.receipt().device();
    trained.y += kept.payload.at(kY);
    v1::ModuleBackwardHeader backward;
    backward.set_token(token);
    backward.set_sequence(1);
    backward.set_micro_batch(n);
    backward.set_want_dx(true);
    backward.set_activations(kept.header.activations().token());
    const auto done = caller.Backward(backward, {{kDy, x}});
    EXPECT_TRUE(done.status.ok()) << done.status.error_message();
    trained.dx += done.payload.at(kDx);
  }
  v1::StepResponse step;
  EXPECT_TRUE(caller.Step(StepOf(token, 1, 2), step).ok());
  trained.squared_norm = step.squared_norm();
  v1::GetTensorsRequest get;
  get.set_token(token);
  get.add_kind(v1::TENSOR_KIND_WEIGHT);
  get.add_kind(v1::TENSOR_KIND_MOMENT1);
  EXPECT_TRUE(caller.Get(get, trained.tensors).ok());
  return trained;
}

TEST(DaemonModuleDevices, GiveTheBitsOfOne) {
  const auto one = References(1), two = References(2);
  const Trained alone = Train(*one, {-1, -1});
  EXPECT_EQ(DevicesOf(alone.registered.status()), std::vector<std::string>{"reference"});
  const Trained cut = Train(*two, {1, 0});
  EXPECT_EQ(DevicesOf(cut.registered.status()),
            (std::vector<std::string>{"reference1", "reference0"}));
  EXPECT_EQ(cut.registered.plan().layer_device(0), 1);
  EXPECT_EQ(cut.registered.plan().layer_device(1), 0);
  EXPECT_EQ(cut.receipt_device, "reference1+reference0");
  EXPECT_EQ(cut.y, alone.y);
  EXPECT_EQ(cut.dx, alone.dx);
  EXPECT_EQ(cut.squared_norm, alone.squared_norm);
  EXPECT_EQ(cut.tensors, alone.tensors);
  EXPECT_EQ(alone.tensors.size(), 8);
}

TEST(DaemonModuleDevices, PlanOfADryRunSaysWhereLayersWouldLie) {
  const auto two = References(2);
  ModuleCaller caller(two->NewChannel());
  v1::RegisterModuleRequest request = Registration("m", {0, 1});
  request.set_dry_run(true);
  v1::RegisterModuleResponse response;
  ASSERT_TRUE(caller.Register(request, response).ok());
  EXPECT_EQ(DevicesOf(response.status()), (std::vector<std::string>{"reference0", "reference1"}));
  EXPECT_EQ(response.plan().layer_device_size(), 2);
  EXPECT_EQ(two->server().module_bytes(), 0);
}

TEST(DaemonModuleDevices, LoseWhatLiesOnALostDevice) {
  std::vector<Device> devices;
  GatedBackend* gpus[2];
  for (GatedBackend*& gpu : gpus) {
    auto engine = std::make_unique<GatedBackend>();
    gpu = engine.get();
    devices.push_back({std::move(engine), [](const HoldDeviceMemory&) {
                         return std::make_unique<ReferenceEngine>();
                       }});
  }
  ServerOptions options = TwoDeviceOptions();
  options.modules.memory.device_bytes = {kModuleMemory, kModuleMemory};
  Daemon daemon(std::move(devices), options);
  auto attend = [&] {
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    return daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply);
  };
  // An idle server sends every call of a kind to the device that its self test found the faster.
  const size_t before = gpus[0]->launches().size();
  ASSERT_TRUE(attend().ok());
  const int lost = gpus[0]->launches().size() > before ? 0 : 1;

  ModuleCaller caller(daemon.NewChannel());
  auto registered = [&](const std::string& name, const std::vector<int>& wishes) {
    v1::RegisterModuleResponse response;
    const grpc::Status status = caller.Register(Registration(name, wishes), response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  const std::string there = registered("there", {lost, -1}).token();
  const std::string cut = registered("cut", {1 - lost, lost}).token();
  const std::string elsewhere = registered("elsewhere", {1 - lost, -1}).token();
  gpus[lost]->FailWith(DeviceLost(absl::InternalError("it fell off the bus")));
  EXPECT_FALSE(attend().ok());
  ASSERT_TRUE(daemon.server().device_lost());

  auto get = [&](const std::string& token) {
    v1::GetModuleRequest request;
    v1::GetModuleResponse response;
    request.set_token(token);
    return caller.Call(&v1::Modules::Stub::GetModule, request, response);
  };
  for (const std::string& token : {there, cut}) {
    const grpc::Status status = get(token);
    EXPECT_EQ(ErrorInfoOf(status).reason(), "MODULE_LOST");
    EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "device_lost");
  }
  EXPECT_TRUE(get(elsewhere).ok());
  EXPECT_EQ(DevicesOf(registered("again", {lost, lost}).status()),
            std::vector<std::string>{absl::StrCat("gated", 1 - lost)});
}

}  // namespace
}  // namespace attnd
