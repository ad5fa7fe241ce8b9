// Compares an empty module call with a small attention call of as many rows: a forward of 128 rows
// through one linear of 64 columns, and attention of one head over 128 rows of 64. One caller, one
// daemon, over TCP on the loopback device and a unix socket; calls take turns of 50.
//
//     bazel build -c opt //server:attnd //tools/benchmarks:module_latency
//     bazel-bin/tools/benchmarks/module_latency bazel-bin/server/attnd [FLAG OF attnd]...
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "client/modules/module_client.h"
#include "net/process_tuning.h"
#include "tools/benchmarks/turns.h"

namespace attnd {
namespace {

constexpr int64_t kRows = 128, kWidth = 64;
constexpr int64_t kLongRows = 2048, kLongWidth = 1024, kLongLayers = 24, kFewRows = 4;
constexpr absl::Duration kShortDeadline = absl::Seconds(3);
constexpr int64_t kLargeRows = 1536, kLargeWidth = 4096, kLargeCalls = 60;

Problem OneHead() { return PlainProblem(1, 1, kRows, kWidth); }

v1::RegisterModuleRequest OneLayer(const std::string& name, int64_t rows, int64_t width) {
  v1::RegisterModuleRequest request;
  request.set_name(name);
  v1::ModuleLayout& layout = *request.mutable_layout();
  layout.set_version(1);
  layout.set_width(static_cast<uint32_t>(width));
  layout.set_element(v1::ELEMENT_FLOAT32);
  layout.set_parameter_element(v1::ELEMENT_FLOAT32);
  v1::Block& block = *layout.add_block();
  block.add_parameter()->set_name("weight");
  block.mutable_parameter(0)->add_shape(static_cast<uint32_t>(width));
  layout.add_layer();
  request.mutable_limits()->set_max_rows(static_cast<uint64_t>(rows));
  return request;
}

v1::RegisterModuleRequest OneLinear() {
  v1::RegisterModuleRequest request = OneLayer("linear", kRows, kWidth);
  v1::Block& block = *request.mutable_layout()->mutable_block(0);
  block.mutable_parameter(0)->add_shape(kWidth);
  block.add_op()->mutable_linear();
  request.mutable_optimizer()->mutable_none();
  return request;
}

v1::RegisterModuleRequest OneNorm() {
  v1::RegisterModuleRequest request = OneLayer("norm", kLargeRows, kLargeWidth);
  v1::Norm& norm = *request.mutable_layout()->mutable_block(0)->add_op()->mutable_norm();
  norm.set_kind(v1::NORM_KIND_RMS);
  norm.set_epsilon(1e-5F);
  norm.set_weight(0);
  request.mutable_optimizer()->mutable_sgd();
  request.mutable_limits()->set_kept_rows(static_cast<uint64_t>(kLargeRows));
  return request;
}

SentPut Weights(const std::vector<uint32_t>& shape) {
  SentTensor tensor;
  tensor.header.set_kind(v1::TENSOR_KIND_WEIGHT);
  tensor.header.set_name("weight");
  tensor.header.set_element(v1::ELEMENT_FLOAT32);
  size_t numbers = 1;
  for (const uint32_t side : shape) {
    tensor.header.add_shape(side);
    numbers *= side;
  }
  tensor.bytes = std::make_shared<const std::string>(numbers * sizeof(float), '\0');
  SentPut put;
  put.tensors.push_back(std::move(tensor));
  put.commit.set_complete(true);
  return put;
}

void Measure(const std::string& title, const std::string& address, const ServerProcess& daemon) {
  auto client = AttentionClient::Connect(
      {.addresses = {address}, .channels_per_address = 1, .wait_for_ready = true});
  CHECK(client.ok() && (*client)->GetServerInfo().ok());
  const Problem p = OneHead();
  const ProblemInputs in = RandomInputs(p, 1);
  AlignedBytes o(p.OutputElements() * 4);
  auto made = ModuleClient(**client).Register(OneLinear(), {}, 0);
  CHECK(made.ok()) << made.status();
  RemoteModule& module = *made->module;
  CHECK(module.Put(Weights({kWidth, kWidth}), {}).ok());
  v1::ModuleForwardHeader header;
  header.mutable_rows()->set_batch(1);
  header.mutable_rows()->set_length(kRows);
  std::vector<std::byte> x(kRows * kWidth * sizeof(float)), y(x.size());
  std::vector<Way> ways;
  ways.push_back({"attention",
                  [&] {
                    auto done = (*client)->Forward(
                        p, {.q = in.q.data(), .k = in.k.data(), .v = in.v.data()}, {.o = o.data()});
                    CHECK(done.ok()) << done.status();
                  },
                  &daemon});
  ways.push_back({"module",
                  [&] {
                    const absl::Status done =
                        module.Forward(header, {.x = x}, absl::MakeSpan(y), {}, nullptr);
                    CHECK(done.ok()) << done;
                  },
                  &daemon});
  Compare(title, ways);
}

void Print(const char* name, std::vector<double>& milliseconds) {
  std::sort(milliseconds.begin(), milliseconds.end());
  std::printf("  %-9s p10 %7.2f  median %7.2f  p90 %7.2f ms\n", name,
              milliseconds[milliseconds.size() / 10], milliseconds[milliseconds.size() / 2],
              milliseconds[milliseconds.size() * 9 / 10]);
}

void MeasureLarge(const std::string& title, const std::string& address) {
  auto client = AttentionClient::Connect({.addresses = {address}, .wait_for_ready = true});
  CHECK(client.ok());
  auto made = ModuleClient(**client).Register(OneNorm(), {}, 0);
  CHECK(made.ok()) << made.status();
  RemoteModule& module = *made->module;
  CHECK(module.Put(Weights({kLargeWidth}), {}).ok());
  v1::ModuleForwardHeader header;
  header.mutable_rows()->set_batch(1);
  header.mutable_rows()->set_length(kLargeRows);
  std::vector<std::byte> x(kLargeRows * kLargeWidth * sizeof(float)), y(x.size()), dx(x.size());
  std::vector<double> forward, backward;
  for (int n = -5; n < kLargeCalls; ++n) {
    header.set_training(true);
    std::unique_ptr<RemoteModule::Activations> kept;
    const absl::Time begun = absl::Now();
    absl::Status done = module.Forward(header, {.x = x}, absl::MakeSpan(y), {}, &kept);
    CHECK(done.ok()) << done;
    const absl::Time middle = absl::Now();
    done = module.Backward(*kept, y, true, {.dx = absl::MakeSpan(dx)}, {});
    CHECK(done.ok()) << done;
    if (n < 0) continue;
    forward.push_back(absl::ToDoubleMilliseconds(middle - begun));
    backward.push_back(absl::ToDoubleMilliseconds(absl::Now() - middle));
  }
  std::printf("%s\n", title.c_str());
  Print("forward", forward);
  Print("backward", backward);
}

// A stack of linear ops without optimizer, weights put, called again and again.
class LinearStack {
 public:
  LinearStack(const AttentionClient& client, int64_t rows, int64_t width, int64_t layers)
      : x_(static_cast<size_t>(rows * width) * sizeof(float)), y_(x_.size()) {
    v1::RegisterModuleRequest request = OneLayer(absl::StrCat("linear", rows), rows, width);
    v1::ModuleLayout& layout = *request.mutable_layout();
    layout.mutable_block(0)->mutable_parameter(0)->add_shape(static_cast<uint32_t>(width));
    layout.mutable_block(0)->add_op()->mutable_linear();
    layout.clear_layer();
    SentPut weights;
    for (int64_t n = 0; n < layers; ++n) {
      layout.add_layer()->set_prefix(absl::StrCat(n, "."));
      const auto side = static_cast<uint32_t>(width);
      weights.tensors.push_back(std::move(Weights({side, side}).tensors[0]));
      weights.tensors.back().header.set_name(absl::StrCat(n, ".weight"));
    }
    weights.commit.set_complete(true);
    request.mutable_optimizer()->mutable_none();
    auto made = ModuleClient(client).Register(request, {}, 0);
    CHECK(made.ok()) << made.status();
    module_ = std::move(made->module);
    CHECK(module_->Put(std::move(weights), {}).ok());
    header_.mutable_rows()->set_batch(1);
    header_.mutable_rows()->set_length(static_cast<uint32_t>(rows));
  }
  absl::Status Forward(const CallOptions& options) {
    return module_->Forward(header_, {.x = x_}, absl::MakeSpan(y_), options, nullptr);
  }

 private:
  std::unique_ptr<RemoteModule> module_;
  v1::ModuleForwardHeader header_;
  std::vector<std::byte> x_, y_;
};

struct SmallCalls {
  std::vector<double> module_ms, attention_ms;
  int failed = 0;
};

SmallCalls MakeSmallCalls(AttentionClient& client, absl::Duration lasting) {
  SmallCalls calls;
  LinearStack stack(client, kFewRows, kWidth, 1);
  const Problem p = OneHead();
  const ProblemInputs in = RandomInputs(p, 1);
  AlignedBytes o(p.OutputElements() * 4);
  for (const absl::Time end = absl::Now() + lasting; absl::Now() < end;) {
    const absl::Time begun = absl::Now();
    calls.failed += !stack.Forward({.timeout = kShortDeadline}).ok();
    const absl::Time middle = absl::Now();
    auto done =
        client.Forward(p, {.q = in.q.data(), .k = in.k.data(), .v = in.v.data()}, {.o = o.data()});
    CHECK(done.ok()) << done.status();
    calls.module_ms.push_back(absl::ToDoubleMilliseconds(middle - begun));
    calls.attention_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - middle));
    absl::SleepFor(absl::Milliseconds(5));
  }
  return calls;
}

void Print(const char* name, SmallCalls calls) {
  std::printf("%s: %zu small calls each, %d failed\n", name, calls.module_ms.size(), calls.failed);
  for (auto* times : {&calls.module_ms, &calls.attention_ms}) {
    std::sort(times->begin(), times->end());
    std::printf("  %-9s p50 %8.2f  p99 %8.2f ms\n",
                times == &calls.module_ms ? "module" : "attention", (*times)[times->size() / 2],
                (*times)[times->size() * 99 / 100]);
  }
}

// Over one daemon whose token file names both callers.
void MeasureBeside(std::vector<std::string> attnd, const std::string& address) {
  const std::string tokens = absl::StrCat("/tmp/module_latency_tokens.", getpid());
  std::ofstream(tokens) << "long long-callers-own-token-0001\nsmall small-callers-own-token-0002\n";
  chmod(tokens.c_str(), 0600);
  attnd.insert(attnd.end(), {"--token_file", tokens});
  const ServerProcess daemon(attnd);
  auto connect = [&](const char* token) {
    auto client = AttentionClient::Connect(
        {.addresses = {address}, .bearer_token = token, .wait_for_ready = true});
    CHECK(client.ok()) << client.status();
    return *std::move(client);
  };
  auto small = connect("small-callers-own-token-0002"),
       other = connect("long-callers-own-token-0001");
  Print("alone", MakeSmallCalls(*small, absl::Seconds(10)));
  LinearStack stack(*other, kLongRows, kLongWidth, kLongLayers);
  std::atomic<bool> ends = false;
  std::vector<double> seconds;
  std::thread calls([&] {
    while (!ends) {
      const absl::Time begun = absl::Now();
      const absl::Status done = stack.Forward({.timeout = absl::Minutes(2)});
      CHECK(done.ok()) << done;
      seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begun));
    }
  });
  absl::SleepFor(absl::Milliseconds(500));
  SmallCalls beside = MakeSmallCalls(*small, absl::Seconds(30));
  ends = true;
  calls.join();
  std::sort(seconds.begin(), seconds.end());
  std::printf("long calls: %zu, median %.2f s\n", seconds.size(), seconds[seconds.size() / 2]);
  Print("beside long calls", std::move(beside));
  unlink(tokens.c_str());
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s path/to/attnd [flag of attnd]...\n", argv[0]);
    return 2;
  }
  for (const bool unix_socket : {false, true}) {
    const std::string address = unix_socket ? absl::StrCat("unix:/tmp/module_latency.", getpid())
                                            : std::string("127.0.0.1:17090");
    std::vector<std::string> attnd = {
        argv[1], "--listen",      address, "--metrics_listen", "127.0.0.1:0", "--log_level",
        "error", "--drain_delay", "0"};
    attnd.insert(attnd.end(), argv + 2, argv + argc);
    if (unix_socket) MeasureBeside(attnd, address);
    ServerProcess daemon(attnd);
    MeasureLarge(unix_socket ? "25 MB each way, unix socket" : "25 MB each way, TCP", address);
    Measure(unix_socket ? "128 rows, unix socket" : "128 rows, TCP", address, daemon);
  }
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
