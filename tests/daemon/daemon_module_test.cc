// The service Modules against a real server, with generated stubs: its life, each reason, each
// limit at its value and one above, calls that are cancelled, a drain, two callers. Retries: the
// test beside this one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/span_collector.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

ServerOptions ModuleServerOptions() {
  ServerOptions options = TestOptions();
  options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
  return options;
}

class DaemonModules : public ::testing::Test {
 protected:
  explicit DaemonModules(const ServerOptions& options = ModuleServerOptions())
      : daemon_(ReferenceDevice(), options), caller_(daemon_.NewChannel()) {}

  std::string Register(const std::string& name = "m") {
    v1::RegisterModuleResponse response;
    const grpc::Status status = caller_.Register(SmallRegistration(name), response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.token();
  }
  // With its weights put: at sequence 1.
  std::string Ready(const std::string& name = "m") {
    const std::string token = Register(name);
    EXPECT_TRUE(Put(token, 0).ok());
    return token;
  }
  grpc::Status Put(const std::string& token, uint64_t sequence,
                   v1::TensorKind kind = v1::TENSOR_KIND_WEIGHT) {
    v1::PutTensorsResponse response;
    return caller_.Put(PutMessages(token, sequence, Bytes(), kind), response);
  }
  std::function<std::string(int64_t)> Bytes() {
    return [this](int64_t count) { return RandomBytes(random_, count); };
  }
  std::string Rows(int rows) { return RandomBytes(random_, rows * kModuleWidth); }
  Streamed<v1::ModuleForwardResult> Forward(const std::string& token, uint64_t sequence, int rows,
                                            bool training = false) {
    return caller_.Forward(ForwardHeader(token, sequence, rows, training), {{kX, Rows(rows)}});
  }
  // Sends the backward of `forward`'s activations.
  Streamed<v1::ModuleBackwardResult> Backward(const std::string& token, uint64_t sequence,
                                              uint32_t micro_batch,
                                              const v1::ModuleForwardResult& forward,
                                              const std::string& dy) {
    v1::ModuleBackwardHeader header;
    header.set_token(token);
    header.set_activations(forward.activations().token());
    header.set_sequence(sequence);
    header.set_micro_batch(micro_batch);
    header.set_want_dx(true);
    return caller_.Backward(std::move(header), {{kDy, dy}});
  }

  Random random_{1};
  Daemon daemon_;
  ModuleCaller caller_;
};

TEST_F(DaemonModules, TrainsFromRegisterToRelease) {
  const std::string token = Register();
  EXPECT_EQ(ReasonOf(Forward(token, 0, 4).status), "WEIGHTS_INCOMPLETE");
  ASSERT_TRUE(Put(token, 0).ok());
  const auto forward = Forward(token, 1, 4, true);
  ASSERT_TRUE(forward.status.ok()) << forward.status.error_message();
  EXPECT_EQ(forward.payload.at(kY).size(), 4 * kModuleWidth * 4);
  EXPECT_EQ(forward.header.sequence(), 1);
  const auto backward = Backward(token, 1, 0, forward.header, Rows(4));
  ASSERT_TRUE(backward.status.ok()) << backward.status.error_message();
  EXPECT_TRUE(backward.header.added());
  EXPECT_EQ(backward.payload.at(kDx).size(), 4 * kModuleWidth * 4);

  v1::GradientStatsRequest ask;
  v1::GradientStatsResponse stats;
  ask.set_token(token);
  ask.set_sequence(1);
  ask.set_micro_batches(1);
  ASSERT_TRUE(caller_.Call(&v1::Modules::Stub::GradientStats, ask, stats).ok());
  EXPECT_TRUE(stats.finite());
  EXPECT_GT(stats.squared_norm(), 0);
  v1::StepResponse step;
  ASSERT_TRUE(caller_.Step(StepOf(token, 1, 1), step).ok());
  EXPECT_TRUE(step.applied());
  EXPECT_EQ(step.sequence(), 2);
  EXPECT_EQ(step.squared_norm(), stats.squared_norm());
  const v1::ModuleStatus status = caller_.Status(token);
  EXPECT_EQ(status.sequence(), 2);
  EXPECT_EQ(status.optimizer_step(), 1);
  EXPECT_TRUE(status.weights_complete());
  EXPECT_EQ(status.micro_batches_size(), 0);

  v1::ReleaseModuleRequest release;
  v1::ReleaseModuleResponse released;
  release.set_token(token);
  EXPECT_TRUE(caller_.Call(&v1::Modules::Stub::Release, release, released).ok());
  EXPECT_TRUE(caller_.Call(&v1::Modules::Stub::Release, release, released).ok());
  EXPECT_EQ(daemon_.server().module_bytes(), 0);
  while (daemon_.server().staging_used() > 0) std::this_thread::yield();  // gRPC lets go late
  EXPECT_EQ(ReasonOf(Forward(token, 2, 4).status), "MODULE_LOST");
}

// A step with numbers, a count and a multiplier for each parameter, of which one stays.
TEST_F(DaemonModules, StepsEachParameterByItself) {
  const std::string token = Ready();
  const auto forward = Forward(token, 1, 4, true);
  ASSERT_TRUE(forward.status.ok()) << forward.status.error_message();
  ASSERT_TRUE(Backward(token, 1, 0, forward.header, Rows(4)).status.ok());
  v1::GradientStatsRequest ask;
  v1::GradientStatsResponse stats;
  ask.set_token(token);
  ask.set_sequence(1);
  ask.set_micro_batches(1);
  ask.set_by_parameter(true);
  ask.set_all_norms(true);
  ASSERT_TRUE(caller_.Call(&v1::Modules::Stub::GradientStats, ask, stats).ok());
  ASSERT_GT(stats.parameter_size(), 1);
  double squared = 0;
  for (const v1::ParameterGradient& of : stats.parameter()) {
    squared += of.squared_norm();
    EXPECT_LE(of.largest(), std::sqrt(of.squared_norm()) * (1 + 1e-12));
    EXPECT_GE(of.sum() * (1 + 1e-12), std::sqrt(of.squared_norm()));
  }
  EXPECT_EQ(squared, stats.squared_norm());

  v1::StepRequest request = StepOf(token, 1, 1);
  v1::StepResponse step;
  request.add_parameter();
  const auto refused = [&] { return caller_.Step(request, step).error_message(); };
  EXPECT_EQ(refused(), absl::StrCat("parameter: expected ", stats.parameter_size(), "..",
                                    stats.parameter_size(), ", got 1"));
  while (request.parameter_size() < stats.parameter_size()) request.add_parameter()->set_step(1);
  EXPECT_EQ(refused(), "values: expected 1..64, got 0");
  request.add_values()->set_learning_rate(0.1);
  EXPECT_EQ(refused(),
            "parameter: expected none beside group, multiplier, max_norm or discard, got some");
  request.clear_group();
  request.mutable_parameter(1)->set_values(1);
  EXPECT_EQ(refused(), "parameter[1].values: expected 0..0, got 1");
  request.mutable_parameter(1)->set_values(0);
  request.mutable_parameter(1)->set_multiplier(0);
  ASSERT_EQ(refused(), "");
  EXPECT_TRUE(step.applied());
  EXPECT_EQ(step.sequence(), 2);
}

// A large chunk comes from gRPC in many pieces, a small one in one.
TEST_F(DaemonModules, LandsChunksOfAnySize) {
  constexpr int kRows = 4096;
  v1::RegisterModuleRequest request = SmallRegistration("m");
  request.mutable_limits()->set_max_rows(kRows);
  request.mutable_limits()->set_kept_rows(0);
  v1::RegisterModuleResponse response;
  const grpc::Status status = caller_.Register(request, response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_TRUE(Put(response.token(), 0).ok());
  const v1::ModuleForwardHeader header = ForwardHeader(response.token(), 1, kRows);
  const Payload x = {kX, Rows(kRows)};
  const auto small = caller_.Forward(header, {x});
  caller_.SendChunksOf(x.second.size());
  const auto large = caller_.Forward(header, {x});
  ASSERT_TRUE(small.status.ok()) << small.status.error_message();
  ASSERT_TRUE(large.status.ok()) << large.status.error_message();
  EXPECT_EQ(small.payload.at(kY), large.payload.at(kY));
}

TEST_F(DaemonModules, SaysThatItServesThem) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(daemon_.stub().GetServerInfo(&context, {}, &info).ok());
  const std::set<std::string> features(info.feature().begin(), info.feature().end());
  EXPECT_TRUE(features.contains("modules"));
}

TEST_F(DaemonModules, RefusesEachBadRegistrationNamingItsField) {
  struct Case {
    const char* name;
    std::function<void(v1::RegisterModuleRequest&)> spoil;
    grpc::StatusCode code;
    const char* reason;
    const char* message;  // its beginning
  };
  using R = v1::RegisterModuleRequest;
  const auto invalid = grpc::StatusCode::INVALID_ARGUMENT;
  const Case cases[] = {
      {"no name", [](R& r) { r.clear_name(); }, invalid, "BAD_FIELD", "name: expected 1..128"},
      {"name of 129", [](R& r) { r.set_name(std::string(129, 'n')); }, invalid, "BAD_FIELD",
       "name: expected 1..128"},
      {"slash", [](R& r) { r.set_name("a/b"); }, invalid, "BAD_FIELD", "name: expected"},
      {"ttl of 999", [](R& r) { r.set_ttl_ms(999); }, invalid, "BAD_FIELD", "ttl_ms: expected"},
      {"width", [](R& r) { r.mutable_layout()->set_width(9); }, invalid, "BAD_LAYOUT", "width: "},
      {"shape",
       [](R& r) { r.mutable_layout()->mutable_block(0)->mutable_parameter(0)->set_shape(1, 16); },
       invalid, "BAD_LAYOUT", "block[0].op[0].linear.weight: expected"},
      {"optimizer", [](R& r) { r.clear_optimizer(); }, invalid, "BAD_FIELD", "optimizer"},
      {"rows", [](R& r) { r.mutable_limits()->set_max_rows(0); }, invalid, "BAD_FIELD",
       "limits.max_rows: expected"},
      {"kept rows", [](R& r) { r.mutable_limits()->set_kept_rows(15); }, invalid, "BAD_FIELD",
       "limits.kept_rows: expected"},
      {"huge", [](R& r) { r.mutable_limits()->set_kept_rows(uint64_t{1} << 30); },
       grpc::StatusCode::OUT_OF_RANGE, "MODULE_TOO_LARGE", ""},
      {"host", [](R& r) { r.set_durability(v1::DURABILITY_HOST); }, grpc::StatusCode::UNIMPLEMENTED,
       "MODULE_UNSUPPORTED", "durability: expected"},
      {"disk", [](R& r) { r.set_durability(v1::DURABILITY_DISK); }, grpc::StatusCode::UNIMPLEMENTED,
       "MODULE_UNSUPPORTED", "durability: expected"},
  };
  for (const Case& each : cases) {
    v1::RegisterModuleRequest request = SmallRegistration("m");
    each.spoil(request);
    v1::RegisterModuleResponse response;
    const grpc::Status status = caller_.Register(request, response);
    EXPECT_EQ(status.error_code(), each.code) << each.name << ": " << status.error_message();
    EXPECT_EQ(ReasonOf(status), each.reason) << each.name << ": " << status.error_message();
    EXPECT_EQ(status.error_message().substr(0, std::string(each.message).size()), each.message)
        << each.name;
  }
  EXPECT_EQ(daemon_.server().module_bytes(), 0);
}

TEST_F(DaemonModules, RegistersOnceByName) {
  const std::string token = Register();
  EXPECT_EQ(Register(), token);
  v1::RegisterModuleRequest other = SmallRegistration("m");
  other.mutable_limits()->set_max_rows(17);
  v1::RegisterModuleResponse response;
  EXPECT_EQ(ReasonOf(caller_.Register(other, response)), "MODULE_EXISTS");
  v1::ListModulesResponse list;
  ASSERT_TRUE(caller_.Call(&v1::Modules::Stub::ListModules, {}, list).ok());
  ASSERT_EQ(list.module_size(), 1);
  EXPECT_EQ(list.module(0).name(), "m");
}

TEST_F(DaemonModules, RefusesCallsNamingWhatIsWrong) {
  const std::string token = Ready();
  const auto step = [&](const std::function<void(v1::StepRequest&)>& spoil) {
    v1::StepRequest request = StepOf(token, 1, 0);
    spoil(request);
    v1::StepResponse response;
    return caller_.Step(request, response);
  };
  const auto forward = [&](const std::function<void(v1::ModuleForwardHeader&)>& spoil) {
    v1::ModuleForwardHeader header = ForwardHeader(token, 1, 4);
    spoil(header);
    return caller_.Forward(header, {{kX, Rows(4)}}).status;
  };
  using F = v1::ModuleForwardHeader;
  using S = v1::StepRequest;
  const std::pair<grpc::Status, const char*> cases[] = {
      {forward([](F& h) { h.set_token("x"); }), "BAD_FIELD"},
      {forward([](F& h) { h.set_sequence(0); }), "SEQUENCE_MISMATCH"},
      {forward([](F& h) { h.set_sequence(2); }), "SEQUENCE_MISMATCH"},
      {forward([](F& h) { h.mutable_rows()->set_length(5); }), "SIZE_MISMATCH"},
      {forward([](F& h) { h.mutable_rows()->set_length(17); }), "BAD_FIELD"},
      {forward([](F& h) { h.mutable_rows()->set_batch(0); }), "BAD_SHAPE"},
      {forward([](F& h) { h.mutable_options()->set_keep_residual(true); }), "BAD_FIELD"},
      {step([](S& s) { s.set_sequence(3); }), "STEP_OUT_OF_ORDER"},
      {step([](S& s) { s.set_sequence(0); }), "STEP_CONFLICT"},
      {step([](S& s) { s.set_micro_batches(2); }), "GRADIENT_INCOMPLETE"},
      {step([](S& s) { s.add_group(); }), "BAD_FIELD"},
      {step([](S& s) { s.mutable_group(0)->set_learning_rate(1.0 / 0.0); }), "BAD_FIELD"},
      {step([](S& s) { s.set_max_norm(-1); }), "BAD_FIELD"},
  };
  int number = 0;
  for (const auto& [status, reason] : cases) {
    EXPECT_EQ(ReasonOf(status), reason) << "case " << number << ": " << status.error_message();
    ++number;
  }
  EXPECT_EQ(caller_.Status(token).sequence(), 1);
  while (daemon_.server().staging_used() > 0) std::this_thread::yield();  // gRPC lets go late
}

TEST_F(DaemonModules, KeepsEachLimitAtItsValueAndOneAbove) {
  const std::string token = Ready();
  EXPECT_TRUE(Forward(token, 1, 16).status.ok());
  EXPECT_FALSE(Forward(token, 1, 17).status.ok());
  // 64 rows of activations.
  std::vector<v1::ModuleForwardResult> kept;
  for (int n = 0; n < 4; ++n) {
    const auto forward = Forward(token, 1, 16, true);
    ASSERT_TRUE(forward.status.ok()) << forward.status.error_message();
    kept.push_back(forward.header);
  }
  EXPECT_EQ(ReasonOf(Forward(token, 1, 1, true).status), "ACTIVATION_PRESSURE");
  EXPECT_TRUE(Forward(token, 1, 1).status.ok());
  EXPECT_TRUE(Backward(token, 1, 0, kept[0], Rows(16)).status.ok());  // spends its own
  EXPECT_TRUE(Forward(token, 1, 16, true).status.ok());
}

TEST_F(DaemonModules, RunsPartsOfTheLayersToTheBitsOfAllOfThem) {
  const std::string token = Ready(), x = Rows(4), dy = Rows(4);
  const auto whole = caller_.Forward(ForwardHeader(token, 1, 4, true), {{kX, x}});
  const auto dx = Backward(token, 1, 0, whole.header, dy);
  ASSERT_TRUE(dx.status.ok()) << dx.status.error_message();
  v1::ModuleForwardHeader headers[2];
  Streamed<v1::ModuleForwardResult> parts[2];
  for (uint32_t n : {0, 1}) {
    headers[n] = ForwardHeader(token, 1, 4, true);
    headers[n].set_first_layer(n);
    headers[n].set_end_layer(n + 1);
    parts[n] = caller_.Forward(headers[n], {{kX, n == 0 ? x : parts[0].payload.at(kY)}});
    ASSERT_TRUE(parts[n].status.ok()) << parts[n].status.error_message();
  }
  EXPECT_EQ(parts[1].payload.at(kY), whole.payload.at(kY));
  // The second by its activations, the first by its inputs again.
  const auto inner = Backward(token, 1, 1, parts[1].header, dy);
  ASSERT_TRUE(inner.status.ok()) << inner.status.error_message();
  v1::ModuleBackwardHeader again;
  again.set_token(token);
  again.set_sequence(1);
  again.set_micro_batch(2);
  again.set_want_dx(true);
  *again.mutable_forward() = headers[0];
  const auto outer = caller_.Backward(again, {{kX, x}, {kDy, inner.payload.at(kDx)}});
  ASSERT_TRUE(outer.status.ok()) << outer.status.error_message();
  EXPECT_EQ(outer.payload.at(kDx), dx.payload.at(kDx));
  // The same micro-batch, but of other layers.
  again.mutable_forward()->clear_end_layer();
  EXPECT_EQ(ReasonOf(caller_.Backward(again, {{kX, x}, {kDy, inner.payload.at(kDx)}}).status),
            "MICRO_BATCH_CONFLICT");
}

TEST_F(DaemonModules, GivesUpTheOldestActivationsWhereACallMakesRoom) {
  const std::string token = Ready();
  std::vector<v1::ModuleForwardResult> kept;
  for (int n = 0; n < 5; ++n) {
    v1::ModuleForwardHeader header = ForwardHeader(token, 1, 16, true);
    header.set_makes_room(n == 4);
    const auto forward = caller_.Forward(header, {{kX, Rows(16)}});
    ASSERT_TRUE(forward.status.ok()) << forward.status.error_message();
    kept.push_back(forward.header);
  }
  EXPECT_EQ(ReasonOf(Backward(token, 1, 0, kept[0], Rows(16)).status), "LEASE_LOST");
  for (uint32_t n : {4, 3, 2, 1}) {
    EXPECT_TRUE(Backward(token, 1, 4 - n, kept[n], Rows(16)).status.ok()) << n;
  }
}

TEST_F(DaemonModules, ReservesMemoryAtRegisterAndLeavesRoomForAPut) {
  v1::RegisterModuleRequest request = SmallRegistration("m");
  request.set_dry_run(true);
  v1::RegisterModuleResponse plan;
  ASSERT_TRUE(caller_.Register(request, plan).ok());
  EXPECT_TRUE(plan.token().empty());
  EXPECT_EQ(daemon_.server().module_bytes(), 0);
  const auto bytes = static_cast<int64_t>(plan.status().host_bytes());
  int64_t put = 0;
  for (const v1::PutTensorsRequest& message : PutMessages("", 0, Bytes())) {
    put += static_cast<int64_t>(message.chunk().data().size());
  }
  struct Case {
    int64_t limit;
    const char *first, *second;
  };
  for (const Case& each :
       {Case{bytes + put - 1, "MODULE_TOO_LARGE", "MODULE_TOO_LARGE"},
        Case{bytes + put, "", "MODULE_QUOTA"}, Case{2 * bytes + put - 1, "", "MODULE_QUOTA"},
        Case{2 * bytes + put, "", ""}}) {
    for (const bool by_caller : {false, true}) {
      ServerOptions options = ModuleServerOptions();
      (by_caller ? options.modules.memory.caller_bytes : options.modules.memory.bytes) = each.limit;
      Daemon daemon(ReferenceDevice(), options);
      ModuleCaller caller(daemon.NewChannel());
      v1::RegisterModuleResponse response;
      v1::RegisterModuleRequest fixed = SmallRegistration("a");
      fixed.mutable_limits()->set_recompute(v1::RECOMPUTE_NONE);
      EXPECT_EQ(ReasonOf(caller.Register(fixed, response)), each.first) << each.limit;
      if (!response.token().empty()) {
        v1::PutTensorsResponse done;
        EXPECT_TRUE(caller.Put(PutMessages(response.token(), 0, Bytes()), done).ok());
      }
      fixed.set_name("b");
      EXPECT_EQ(ReasonOf(caller.Register(fixed, response)), each.second) << each.limit;
    }
  }
}

TEST_F(DaemonModules, LetsACallerHaveSoManyModules) {
  ServerOptions options = ModuleServerOptions();
  options.modules.max_modules = 2;
  Daemon daemon(ReferenceDevice(), options);
  ModuleCaller caller(daemon.NewChannel());
  v1::RegisterModuleResponse response;
  EXPECT_TRUE(caller.Register(SmallRegistration("a"), response).ok());
  EXPECT_TRUE(caller.Register(SmallRegistration("b"), response).ok());
  EXPECT_EQ(ReasonOf(caller.Register(SmallRegistration("c"), response)), "MODULE_QUOTA");
}

TEST_F(DaemonModules, PutsWholeOrNothingAndGivesTheSameBytesBack) {
  const std::string token = Register();
  std::vector<v1::PutTensorsRequest> messages = PutMessages(token, 0, Bytes());
  v1::PutTensorsResponse response;
  auto spoiled = messages;
  spoiled[1].mutable_tensor()->set_digest("x");
  EXPECT_EQ(ReasonOf(caller_.Put(spoiled, response)), "DIGEST_MISMATCH");
  spoiled = messages;
  spoiled.pop_back();  // no commit
  EXPECT_EQ(ReasonOf(caller_.Put(spoiled, response)), "CHUNK_ORDER");
  spoiled = messages;
  spoiled.erase(spoiled.begin() + 1, spoiled.begin() + 3);  // a tensor is not there
  EXPECT_EQ(ReasonOf(caller_.Put(spoiled, response)), "WEIGHTS_INCOMPLETE");
  spoiled = messages;
  spoiled[2].mutable_chunk()->mutable_data()->pop_back();
  EXPECT_EQ(ReasonOf(caller_.Put(spoiled, response)), "CHUNK_ORDER");
  spoiled = messages;
  spoiled[1].mutable_tensor()->set_name("layer0.none");
  EXPECT_EQ(ReasonOf(caller_.Put(spoiled, response)), "BAD_FIELD");
  EXPECT_EQ(caller_.Status(token).sequence(), 0);

  ASSERT_TRUE(caller_.Put(messages, response).ok());
  EXPECT_FALSE(response.replayed());
  ASSERT_TRUE(caller_.Put(messages, response).ok());
  EXPECT_TRUE(response.replayed());
  EXPECT_EQ(response.status().sequence(), 1);

  std::map<std::string, std::string> whole, shards;
  v1::GetTensorsRequest get;
  get.set_token(token);
  ASSERT_TRUE(caller_.Get(get, whole).ok());
  ASSERT_EQ(whole.size(), 4);
  EXPECT_EQ(whole.at("layer0.weight/1"), messages[2].chunk().data());
  get.set_shards(3);
  for (uint32_t shard = 0; shard < 3; ++shard) {
    get.set_shard(shard);
    ASSERT_TRUE(caller_.Get(get, shards).ok());
  }
  EXPECT_EQ(shards, whole);
  get.set_shard(3);
  EXPECT_EQ(ReasonOf(caller_.Get(get, shards)), "BAD_FIELD");
  EXPECT_GT(daemon_.server().module_bytes(), 0);
}

// Gradients that are put are a micro-batch: in its turn, once, and what follows is added to them.
TEST_F(DaemonModules, PutsGradientsAsAMicroBatch) {
  const std::string token = Ready();
  const auto forward = Forward(token, 1, 4, true), later = Forward(token, 1, 4, true);
  ASSERT_TRUE(Backward(token, 1, 0, forward.header, Rows(4)).status.ok());
  v1::GetTensorsRequest get;
  get.set_token(token);
  get.add_kind(v1::TENSOR_KIND_GRADIENT);
  std::map<std::string, std::string> before, after;
  ASSERT_TRUE(caller_.Get(get, before).ok());

  std::vector<v1::PutTensorsRequest> messages =
      PutMessages(token, 1, Bytes(), v1::TENSOR_KIND_GRADIENT);
  messages.erase(messages.begin() + 3, messages.end() - 1);  // layer0.weight alone
  v1::PutTensorsResponse response;
  messages[0].mutable_header()->set_micro_batch(1);
  EXPECT_EQ(ReasonOf(caller_.Put(messages, response)), "BAD_FIELD");  // a commit of weights
  messages.back().mutable_commit()->clear_complete();
  auto other = messages;
  other[1].mutable_tensor()->set_kind(v1::TENSOR_KIND_WEIGHT);
  EXPECT_EQ(ReasonOf(caller_.Put(other, response)), "BAD_FIELD");
  other = messages;
  other[0].mutable_header()->set_sequence(2);
  EXPECT_EQ(ReasonOf(caller_.Put(other, response)), "SEQUENCE_MISMATCH");
  ASSERT_TRUE(caller_.Put(messages, response).ok());
  EXPECT_FALSE(response.replayed());
  ASSERT_TRUE(caller_.Put(messages, response).ok());
  EXPECT_TRUE(response.replayed());
  EXPECT_EQ(response.status().sequence(), 1);
  EXPECT_EQ(response.status().micro_batches(1), 2);
  messages[2].mutable_chunk()->set_data(std::string(messages[2].chunk().data().size(), 0));
  EXPECT_EQ(ReasonOf(caller_.Put(messages, response)), "MICRO_BATCH_CONFLICT");

  ASSERT_TRUE(caller_.Get(get, after).ok());
  EXPECT_NE(after.at("layer0.weight/2"), before.at("layer0.weight/2"));
  after["layer0.weight/2"] = before["layer0.weight/2"];
  EXPECT_EQ(after, before);
  EXPECT_TRUE(Backward(token, 1, 2, later.header, Rows(4)).status.ok());  // its activations stayed
  v1::StepResponse step;
  EXPECT_EQ(ReasonOf(caller_.Step(StepOf(token, 1, 2), step)), "GRADIENT_INCOMPLETE");
  EXPECT_TRUE(caller_.Step(StepOf(token, 1, 3), step).ok());
}

TEST_F(DaemonModules, GivesAllBackWhenCallsAreCancelledInEachState) {
  const std::string token = Ready();
  const int64_t held = daemon_.server().module_bytes();
  const v1::ModuleForwardHeader header = [&] {
    v1::ModuleForwardHeader h = ForwardHeader(token, 1, 4);
    h.add_payload()->set_tensor(kX);
    h.mutable_payload(0)->set_bytes(4 * kModuleWidth * 4);
    return h;
  }();
  v1::ModuleForwardRequest message;
  for (int writes = 0; writes < 3; ++writes) {
    auto context = caller_.NewContext();
    auto stream = caller_.stub().Forward(context.get());
    *message.mutable_header() = header;
    if (writes > 0) stream->Write(message);
    message.mutable_chunk()->set_tensor(kX);
    message.mutable_chunk()->set_data(std::string(32, '\0'));
    if (writes > 1) stream->Write(message);
    context->TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // A micro-batch that waits for one before it.
  const auto forward = Forward(token, 1, 4, true);
  std::optional<grpc::Status> waited;
  auto context = caller_.NewContext();
  auto stream = caller_.stub().Backward(context.get());
  v1::ModuleBackwardRequest early;
  early.mutable_header()->set_token(token);
  early.mutable_header()->set_activations(forward.header.activations().token());
  early.mutable_header()->set_sequence(1);
  early.mutable_header()->set_micro_batch(1);
  early.mutable_header()->add_payload()->set_tensor(kDy);
  early.mutable_header()->mutable_payload(0)->set_bytes(4 * kModuleWidth * 4);
  stream->Write(early);
  early.mutable_chunk()->set_tensor(kDy);
  early.mutable_chunk()->set_data(Rows(4));
  stream->Write(early);
  stream->WritesDone();
  // Its tensors have come: dy, and with them all that it holds.
  while (daemon_.server().staging_used() == 0) std::this_thread::yield();
  context->TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);

  while (daemon_.server().staging_used() > 0) std::this_thread::yield();
  EXPECT_EQ(daemon_.server().module_bytes(), held);
  EXPECT_TRUE(Backward(token, 1, 0, forward.header, Rows(4)).status.ok());
}

TEST_F(DaemonModules, LetsCallersFetchTheirTensorsWhileItDrains) {
  const std::string token = Ready();
  const auto forward = Forward(token, 1, 4, true);
  ASSERT_TRUE(Backward(token, 1, 0, forward.header, Rows(4)).status.ok());
  bool tried = false;
  daemon_.server().Drain(absl::ZeroDuration(), absl::Seconds(5), [&](absl::Duration) {
    std::this_thread::yield();
    if (tried) return true;
    if (ReasonOf(Forward(token, 1, 4).status) != "DRAINING") return true;  // not yet
    tried = true;
    v1::RegisterModuleResponse registered;
    EXPECT_EQ(ReasonOf(caller_.Register(SmallRegistration("n"), registered)), "DRAINING");
    EXPECT_EQ(ReasonOf(Put(token, 1)), "DRAINING");
    v1::StepResponse step;
    EXPECT_TRUE(caller_.Step(StepOf(token, 1, 1), step).ok());
    std::map<std::string, std::string> tensors;
    v1::GetTensorsRequest get;
    get.set_token(token);
    get.add_kind(v1::TENSOR_KIND_WEIGHT);
    get.add_kind(v1::TENSOR_KIND_MOMENT1);
    EXPECT_TRUE(caller_.Get(get, tensors).ok());
    EXPECT_EQ(tensors.size(), 8);
    return true;
  });
  EXPECT_TRUE(tried);
}

TEST_F(DaemonModules, HidesAModuleFromOtherCallers) {
  ServerOptions options = ModuleServerOptions();
  options.token_file = absl::StrCat(testing::TempDir(), "/module_tokens_", getpid());
  std::ofstream(options.token_file) << "alice aaaabbbbccccdddd\nbob bbbbccccddddeeee\n";
  Daemon daemon(ReferenceDevice(), options);
  ModuleCaller alice(daemon.NewChannel(), "aaaabbbbccccdddd");
  ModuleCaller bob(daemon.NewChannel(), "bbbbccccddddeeee");
  ModuleCaller nobody(daemon.NewChannel());
  v1::RegisterModuleResponse of_alice, of_bob;
  ASSERT_TRUE(alice.Register(SmallRegistration("m"), of_alice).ok());
  ASSERT_TRUE(bob.Register(SmallRegistration("m", 0.5f), of_bob).ok());  // a name of his own
  EXPECT_EQ(ReasonOf(nobody.Register(SmallRegistration("m"), of_bob)), "TOKEN_MISSING");
  v1::GetModuleRequest get;
  v1::GetModuleResponse got;
  get.set_token(of_alice.token());
  EXPECT_EQ(ReasonOf(bob.Call(&v1::Modules::Stub::GetModule, get, got)), "MODULE_NOT_OWNED");
  get.mutable_token()->back() ^= 1;  // forged
  EXPECT_EQ(ReasonOf(alice.Call(&v1::Modules::Stub::GetModule, get, got)), "MODULE_NOT_OWNED");
  v1::ListModulesResponse list;
  ASSERT_TRUE(bob.Call(&v1::Modules::Stub::ListModules, {}, list).ok());
  EXPECT_EQ(list.module_size(), 1);
}

TEST(DaemonWithoutModules, AnswersUnimplemented) {
  Daemon daemon(ReferenceDevice());
  ModuleCaller caller(daemon.NewChannel());
  v1::RegisterModuleResponse response;
  EXPECT_EQ(caller.Register(SmallRegistration("m"), response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST(ModuleSpans, OfSampledCallsReachTheCollector) {
  SpanCollector collector;
  ServerOptions options = ModuleServerOptions();
  options.otlp_endpoint = collector.endpoint();
  auto daemon = std::make_unique<Daemon>(ReferenceDevice(), options);
  ModuleCaller caller(daemon->NewChannel());
  Random random(1);
  const std::string trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0";
  v1::RegisterModuleResponse registered;
  ASSERT_TRUE(caller.Register(SmallRegistration("m"), registered).ok());
  const auto bytes = [&](int64_t count) { return RandomBytes(random, count); };
  v1::PutTensorsResponse put;
  caller.TraceAs(trace + "0");
  ASSERT_TRUE(caller.Put(PutMessages(registered.token(), 0, bytes), put).ok());
  caller.TraceAs(trace + "1");
  const auto header = ForwardHeader(registered.token(), 1, 4);
  ASSERT_TRUE(caller.Forward(header, {{kX, bytes(4 * kModuleWidth)}}).status.ok());
  ASSERT_FALSE(caller.Register(v1::RegisterModuleRequest(), registered).ok());
  for (const bool is_wrong : {false, true}) {
    v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
    if (is_wrong) request.mutable_problem()->set_qk_head_dim(0);
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    context.AddMetadata("traceparent", trace + "1");
    EXPECT_EQ(daemon->stub().Forward(&context, request, &reply).ok(), !is_wrong);
  }
  daemon.reset();  // sends what waits
  const std::string spans = collector.Posted(1);
  const auto count = [&](absl::string_view text) {
    return std::vector<absl::string_view>(absl::StrSplit(spans, text)).size() - 1;
  };
  EXPECT_EQ(count("attnd.v1.Modules/Forward"), 1);
  EXPECT_EQ(count("attnd.v1.Modules/Register"), 1);
  EXPECT_EQ(count("attnd.v1.Modules/PutTensors"), 0);  // not sampled
  EXPECT_EQ(count("attnd.v1.Attention/Forward"), 2);
  EXPECT_EQ(count("\"name\":\"kernel\""), 2);
  EXPECT_EQ(count("\"code\":2"), 2);
  EXPECT_EQ(count("4bf92f3577b34da6a3ce929d0e0e4736"), count("\"traceId\""));
}

}  // namespace
}  // namespace attnd
