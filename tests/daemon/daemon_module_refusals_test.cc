// Refusals of the service Modules against a real server: before any payload, with what is needed to
// come back, to other modules' activations, and of sizes that would take all memory.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/modules/registered_module.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd {
namespace {

// Milliseconds of its RetryInfo.
std::optional<int64_t> RetryDelayOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::RetryInfo info;
  if (!details.ParseFromString(status.error_details())) return std::nullopt;
  for (const auto& detail : details.details()) {
    if (!detail.UnpackTo(&info)) continue;
    return info.retry_delay().seconds() * 1000 + info.retry_delay().nanos() / 1000000;
  }
  return std::nullopt;
}

// The stream stays open, so a server that waits for payloads would wait for ever.
template <class Stream, class Request>
grpc::Status AfterHeader(const std::unique_ptr<Stream>& stream, const Request& request) {
  stream->Write(request);
  return stream->Finish();
}

class Refusals : public ::testing::Test {
 protected:
  explicit Refusals(const ServerOptions& options = Options())
      : daemon_(ReferenceDevice(), options) {}

  static ServerOptions Options() {
    ServerOptions options = TestOptions();
    options.modules.memory = {int64_t{8} << 20, int64_t{8} << 20};
    return options;
  }

  std::string RegisterRefused(const std::string& name = "m") {
    v1::RegisterModuleResponse response;
    const grpc::Status status = caller_.Register(SmallRegistration(name), response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.token();
  }
  std::string Ready(const std::string& name = "m") {
    const std::string token = RegisterRefused(name);
    v1::PutTensorsResponse response;
    const auto bytes = [this](int64_t count) { return RandomBytes(random_, count); };
    EXPECT_TRUE(caller_.Put(PutMessages(token, 0, bytes), response).ok());
    return token;
  }
  std::string Rows(int rows) { return RandomBytes(random_, rows * kModuleWidth); }
  std::string Activations(const std::string& token, int rows = 4) {
    const auto forward = caller_.Forward(ForwardHeader(token, 1, rows, true), {{kX, Rows(rows)}});
    EXPECT_TRUE(forward.status.ok()) << forward.status.error_message();
    return forward.header.activations().token();
  }
  static v1::ModuleBackwardHeader BackwardOf(const std::string& token,
                                             const std::string& activations, uint32_t micro_batch) {
    v1::ModuleBackwardHeader header;
    header.set_token(token);
    header.set_activations(activations);
    header.set_sequence(1);
    header.set_micro_batch(micro_batch);
    return header;
  }

  // Its header alone, with a gradient of so many bytes.
  grpc::Status BackwardWithin(std::chrono::milliseconds time, v1::ModuleBackwardHeader header,
                              int64_t bytes) {
    auto context = caller_.NewContext();
    context->set_deadline(std::chrono::system_clock::now() + time);
    v1::PayloadSize& size = *header.add_payload();
    size.set_tensor(kDy);
    size.set_bytes(bytes);
    v1::ModuleBackwardRequest request;
    *request.mutable_header() = std::move(header);
    return AfterHeader(caller_.stub().Backward(context.get()), request);
  }

  std::string token_;
  Random random_{1};
  Daemon daemon_;
  ModuleCaller caller_{daemon_.NewChannel()};
};

constexpr int kLargeRows = 16;
constexpr int64_t kLargeBytes = kLargeRows * kModuleWidth * 4;

// Callers whose share of staging memory is four of the largest tensors.
class SmallShare : public Refusals {
 protected:
  SmallShare() : Refusals(Options()) {}

  static ServerOptions Options() {
    ServerOptions options = Refusals::Options();
    options.admission.caller_max_bytes = 4 * kLargeBytes;
    return options;
  }
};

TEST_F(Refusals, ComeBeforePayloads) {
  const std::string token = Ready(), empty = RegisterRefused("empty");
  const std::string activations = Activations(token);
  const auto forward = [&](const std::function<void(v1::ModuleForwardHeader&)>& spoil) {
    v1::ModuleForwardRequest request;
    v1::ModuleForwardHeader& header = *request.mutable_header();
    header = ForwardHeader(token, 1, 4);
    header.add_payload()->set_tensor(kX);
    header.mutable_payload(0)->set_bytes(4 * kModuleWidth * 4);
    spoil(header);
    auto context = caller_.NewContext();
    return AfterHeader(caller_.stub().Forward(context.get()), request);
  };
  const auto backward = [&](const std::function<void(v1::ModuleBackwardHeader&)>& spoil) {
    v1::ModuleBackwardRequest request;
    v1::ModuleBackwardHeader& header = *request.mutable_header();
    header = BackwardOf(token, activations, 0);
    header.add_payload()->set_tensor(kDy);
    header.mutable_payload(0)->set_bytes(4 * kModuleWidth * 4);
    spoil(header);
    auto context = caller_.NewContext();
    return AfterHeader(caller_.stub().Backward(context.get()), request);
  };
  const auto put_message = [&](const v1::PutTensorsRequest& request) {
    auto context = caller_.NewContext();
    v1::PutTensorsResponse response;
    return AfterHeader(caller_.stub().PutTensors(context.get(), &response), request);
  };
  const auto put = [&](const std::string& of, uint64_t sequence) {
    v1::PutTensorsRequest request;
    request.mutable_header()->set_token(of);
    request.mutable_header()->set_sequence(sequence);
    return put_message(request);
  };
  using F = v1::ModuleForwardHeader;
  using B = v1::ModuleBackwardHeader;
  const auto repeated = [&](B& h) -> F& {  // the forward, in the place of its activations
    h.clear_activations();
    *h.mutable_forward() = ForwardHeader(token, 0, 4, true);
    return *h.mutable_forward();
  };
  v1::PutTensorsRequest chunk;
  chunk.mutable_chunk()->set_data("x");
  const std::pair<grpc::Status, const char*> cases[] = {
      {forward([](F& h) { h.set_token("x"); }), "BAD_FIELD"},
      {forward([&](F& h) { h.set_token(empty), h.set_sequence(0); }), "WEIGHTS_INCOMPLETE"},
      {forward([](F& h) { h.set_sequence(2); }), "SEQUENCE_MISMATCH"},
      {forward([](F& h) { h.mutable_rows()->set_length(17); }), "BAD_FIELD"},
      {forward([](F& h) { h.set_end_layer(3); }), "BAD_FIELD"},
      {forward([](F& h) { h.set_first_layer(2); }), "BAD_FIELD"},
      {forward([](F& h) { h.set_first_layer(1), h.set_end_layer(1); }), "BAD_FIELD"},
      {forward([](F& h) { h.mutable_payload(0)->set_bytes(1); }), "SIZE_MISMATCH"},
      {forward([](F& h) { h.clear_payload(); }), "SIZE_MISMATCH"},
      {forward([](F& h) { *h.add_payload() = h.payload(0); }), "SIZE_MISMATCH"},
      {backward([](B& h) { h.set_token("x"); }), "BAD_FIELD"},
      {backward([](B& h) { h.set_sequence(0); }), "SEQUENCE_MISMATCH"},
      {backward([](B& h) { h.set_activations("x"); }), "BAD_FIELD"},
      {backward([](B& h) { h.clear_activations(); }), "BAD_FIELD"},
      {backward([](B& h) { h.mutable_payload(0)->set_tensor(kX); }), "SIZE_MISMATCH"},
      {backward([&](B& h) { repeated(h).mutable_options(); }), "BAD_FIELD"},
      {backward([&](B& h) { repeated(h).set_training(false); }), "BAD_FIELD"},
      {backward([&](B& h) { repeated(h).set_token(empty); }), "BAD_FIELD"},
      {backward([](B& h) { h.set_no_weight_gradients(true), h.set_micro_batch(1); }), "BAD_FIELD"},
      {put("x", 1), "BAD_FIELD"},
      {put_message(v1::PutTensorsRequest()), "BAD_FIELD"},
      {put_message(chunk), "CHUNK_ORDER"},
      {put(token, 3), "STEP_OUT_OF_ORDER"},
  };
  int number = 0;
  for (const auto& [status, reason] : cases) {
    EXPECT_EQ(ReasonOf(status), reason) << "case " << number << ": " << status.error_message();
    ++number;
  }
  while (daemon_.server().staging_used() > 0) std::this_thread::yield();  // gRPC lets go late
}

TEST_F(Refusals, SayWhenToComeAgain) {
  const std::string token = Ready();
  const v1::ModuleForwardHeader whole = ForwardHeader(token, 1, 16, true);
  for (int n = 0; n < 4; ++n) EXPECT_TRUE(caller_.Forward(whole, {{kX, Rows(16)}}).status.ok());
  const grpc::Status full = caller_.Forward(whole, {{kX, Rows(16)}}).status;
  EXPECT_EQ(full.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(full), "ACTIVATION_PRESSURE");
  EXPECT_GT(RetryDelayOf(full).value_or(0), 0);

  const std::string other = Ready("other");
  std::vector<std::string> kept;
  for (int n = 0; n <= kMaxEarlyMicroBatches + 1; ++n) kept.push_back(Activations(other));
  std::vector<std::thread> early;
  for (uint32_t n = 1; n <= kMaxEarlyMicroBatches; ++n) {
    early.emplace_back([&, n] {
      ModuleCaller own(daemon_.NewChannel());
      Random random(n);
      const std::string dy = RandomBytes(random, 4 * kModuleWidth);
      EXPECT_TRUE(own.Backward(BackwardOf(other, kept[n], n), {{kDy, dy}}).status.ok());
    });
  }
  // Until all of them wait, one more waits too, for as long as its deadline lets it.
  constexpr uint32_t kBeyond = kMaxEarlyMicroBatches + 1;
  grpc::Status beyond;
  do {
    beyond = BackwardWithin(std::chrono::milliseconds(50),
                            BackwardOf(other, kept[kBeyond], kBeyond), 4 * kModuleWidth * 4);
  } while (beyond.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(ReasonOf(beyond), "MICRO_BATCH_EARLY");
  EXPECT_EQ(ErrorInfoOf(beyond).metadata().at("next"), "0");
  EXPECT_GT(RetryDelayOf(beyond).value_or(0), 0);
  const std::string first = Rows(4);
  EXPECT_TRUE(caller_.Backward(BackwardOf(other, kept[0], 0), {{kDy, first}}).status.ok());
  for (std::thread& thread : early) thread.join();

  const std::string again = Activations(other);
  const grpc::Status changed =
      caller_.Backward(BackwardOf(other, again, 0), {{kDy, Rows(4)}}).status;
  EXPECT_EQ(changed.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonOf(changed), "MICRO_BATCH_CONFLICT");
}

// Two of them have half of the share; the one that they wait for needs a gradient and its result.
TEST_F(SmallShare, LeavesHalfOfItToMicroBatchesThatAreNotEarly) {
  const std::string token = Ready();
  std::vector<std::string> kept;
  for (int n = 0; n < 4; ++n) kept.push_back(Activations(token, kLargeRows));
  std::vector<std::thread> early;
  for (uint32_t n = 1; n <= 2; ++n) {
    early.emplace_back([&, n] {
      ModuleCaller own(daemon_.NewChannel());
      const std::string dy(kLargeBytes, '\0');
      grpc::Status status;
      do {  // again where another was looked at together with it
        status = own.Backward(BackwardOf(token, kept[n], n), {{kDy, dy}}).status;
      } while (ReasonOf(status) == "MICRO_BATCH_EARLY");
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  }
  // Until both of them wait, one more waits too, for as long as its deadline lets it.
  grpc::Status beyond;
  do {
    beyond =
        BackwardWithin(std::chrono::milliseconds(50), BackwardOf(token, kept[3], 3), kLargeBytes);
  } while (beyond.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(ReasonOf(beyond), "MICRO_BATCH_EARLY") << beyond.error_message();
  v1::ModuleBackwardHeader first = BackwardOf(token, kept[0], 0);
  first.set_want_dx(true);
  const auto done = caller_.Backward(first, {{kDy, Rows(kLargeRows)}});
  EXPECT_TRUE(done.status.ok()) << done.status.error_message();
  for (std::thread& thread : early) thread.join();
}

TEST_F(Refusals, OpenActivationsToTheirModuleAlone) {
  const std::string mine = Ready(), other = Ready("other");
  const std::string kept = Activations(mine);
  const auto backward = [&](const std::string& token, const std::string& activations) {
    return caller_.Backward(BackwardOf(token, activations, 0), {{kDy, Rows(4)}}).status;
  };
  EXPECT_EQ(ReasonOf(backward(other, kept)), "LEASE_LOST");
  for (size_t at = 0; at < kept.size(); ++at) {
    std::string forged = kept;
    forged[at] = static_cast<char>(forged[at] ^ 1);
    const grpc::Status status = backward(mine, forged);
    EXPECT_FALSE(status.ok()) << at;
    EXPECT_NE(status.error_code(), grpc::StatusCode::INTERNAL) << at;
  }
  EXPECT_FALSE(backward(mine, mine).ok());  // the module's own token
  EXPECT_FALSE(backward(kept, kept).ok());  // and the other way round
  EXPECT_TRUE(backward(mine, kept).ok());
}

TEST_F(Refusals, OfModuleTokensThatWereForged) {
  const std::string token = RegisterRefused();
  v1::GetModuleRequest get;
  v1::GetModuleResponse got;
  for (size_t at = 0; at < token.size(); ++at) {
    std::string forged = token;
    forged[at] = static_cast<char>(forged[at] ^ 1);
    get.set_token(forged);
    const grpc::Status status = caller_.Call(&v1::Modules::Stub::GetModule, get, got);
    const std::string reason = ReasonOf(status);
    EXPECT_TRUE(reason == "MODULE_NOT_OWNED" || reason == "BAD_FIELD" ||
                reason == "EPOCH_CHANGED" || reason == "WRONG_REPLICA")
        << at << ": " << status.error_message();
  }
  get.set_token(token.substr(0, token.size() - 1));
  const grpc::Status cut = caller_.Call(&v1::Modules::Stub::GetModule, get, got);
  EXPECT_EQ(ReasonOf(cut), "BAD_FIELD");
  EXPECT_EQ(ErrorInfoOf(cut).metadata().at("expected"), "a token that Register gave");
  get.set_token(token);
  EXPECT_TRUE(caller_.Call(&v1::Modules::Stub::GetModule, get, got).ok());
}

// A request of some kilobytes that names one kind again and again asks for no more than that kind.
TEST_F(Refusals, CountAKindOnceAndRefuseMoreThanThereAre) {
  v1::GetTensorsRequest get;
  get.set_token(Ready());
  std::map<std::string, std::string> once, repeated;
  for (const v1::TensorKind kind : {v1::TENSOR_KIND_WEIGHT, v1::TENSOR_KIND_MOMENT1}) {
    get.add_kind(kind);
  }
  EXPECT_TRUE(caller_.Get(get, once).ok());
  for (int n = 0; n < 3; ++n) get.add_kind(v1::TENSOR_KIND_WEIGHT);
  EXPECT_TRUE(caller_.Get(get, repeated).ok());
  EXPECT_EQ(repeated, once);
  get.add_kind(v1::TENSOR_KIND_WEIGHT);
  EXPECT_EQ(ReasonOf(caller_.Get(get, repeated)), "BAD_FIELD");
  for (int n = 0; n < 20'000; ++n) get.add_kind(v1::TENSOR_KIND_WEIGHT);
  EXPECT_EQ(ReasonOf(caller_.Get(get, repeated)), "BAD_FIELD");
}

// Sizes up to 2^40 numbers, 2^32 rows and 2^64 bytes.
TEST_F(Refusals, OfHugeSizesTakeNoMemory) {
  using R = v1::RegisterModuleRequest;
  const auto matrix = [](R& r, uint32_t rows, uint32_t columns) {
    v1::Block& block = *r.mutable_layout()->mutable_block(0);
    block.mutable_parameter(0)->set_shape(0, rows);
    block.mutable_parameter(0)->set_shape(1, columns);
  };
  const std::function<void(R&)> spoils[] = {
      [&](R& r) { matrix(r, 1 << 20, 1 << 20); },
      [&](R& r) {
        matrix(r, 1 << 20, 8),
            r.mutable_layout()->mutable_block(0)->mutable_parameter(1)->set_shape(0, 1 << 20);
      },
      [&](R& r) { matrix(r, UINT32_MAX, UINT32_MAX); },
      [](R& r) {  // 512 layers of 2^31 numbers
        v1::Block& block = *r.mutable_layout()->mutable_block(0);
        r.mutable_layout()->set_width(1 << 16);
        for (int n = 0; n < 2; ++n)
          block.mutable_parameter(0)->set_shape(n, n == 0 ? 1 << 16 : 1 << 16);
        block.mutable_parameter(1)->set_shape(0, 1 << 16);
        for (int n = 2; n < 256; ++n)
          r.mutable_layout()->add_layer()->set_prefix(absl::StrCat(n, "."));
      },
      [](R& r) {
        r.mutable_limits()->set_max_rows(uint64_t{1} << 32),
            r.mutable_limits()->set_kept_rows(uint64_t{1} << 32);
      },
      [](R& r) { r.mutable_limits()->set_kept_rows(UINT64_MAX); },
      [](R& r) { r.mutable_limits()->set_max_memory_rows(uint64_t{1} << 40); },
  };
  const std::string token = Ready();
  const int64_t module_bytes = daemon_.server().module_bytes();
  const int64_t before = ResidentBytes();
  const absl::Time begun = absl::Now();
  int calls = 0;
  for (const auto& spoil : spoils) {
    for (const bool dry_run : {false, true}) {
      R request = SmallRegistration("huge");
      spoil(request);
      request.set_dry_run(dry_run);
      v1::RegisterModuleResponse response;
      const grpc::Status status = caller_.Register(request, response);
      EXPECT_TRUE(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                  status.error_code() == grpc::StatusCode::OUT_OF_RANGE)
          << calls << ": " << status.error_message();
      EXPECT_TRUE(ErrorInfoOf(status).metadata().contains("field")) << status.error_message();
      ++calls;
    }
  }
  using F = v1::ModuleForwardHeader;
  const std::function<void(F&)> rows[] = {
      [](F& h) {
        h.mutable_rows()->set_batch(UINT32_MAX), h.mutable_rows()->set_length(UINT32_MAX);
      },
      [](F& h) { h.mutable_rows()->set_batch(1 << 20), h.mutable_rows()->set_length(1 << 20); },
      [](F& h) { h.mutable_rows()->set_first_row(UINT64_MAX); },
      [](F& h) {
        h.mutable_rows()->mutable_lengths()->add_cu_seqlens_q(0),
            h.mutable_rows()->mutable_lengths()->add_cu_seqlens_q(UINT32_MAX);
      },
      [](F& h) {
        for (const uint32_t n : {1u, 1024u, 1u << 20, 1u << 20})
          h.mutable_rows()->mutable_bool_mask()->add_shape(n);
      },
      [](F& h) { h.mutable_rows()->set_memory_length(UINT32_MAX); },
      [](F& h) { h.mutable_payload(0)->set_bytes(UINT64_MAX); },
      [](F& h) { h.mutable_payload(0)->set_bytes(uint64_t{1} << 40); },
  };
  for (const auto& spoil : rows) {
    v1::ModuleForwardRequest request;
    *request.mutable_header() = ForwardHeader(token, 1, 4, true);
    request.mutable_header()->add_payload()->set_tensor(kX);
    request.mutable_header()->mutable_payload(0)->set_bytes(4 * kModuleWidth * 4);
    spoil(*request.mutable_header());
    auto context = caller_.NewContext();
    const grpc::Status status = AfterHeader(caller_.stub().Forward(context.get()), request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << calls << ": " << status.error_message();
    ++calls;
  }
  std::vector<v1::PutTensorsRequest> put(2);
  put[0].mutable_header()->set_token(token);
  put[0].mutable_header()->set_sequence(1);
  put[1].mutable_tensor()->set_kind(v1::TENSOR_KIND_WEIGHT);
  put[1].mutable_tensor()->set_name("layer0.weight");
  put[1].mutable_tensor()->set_element(v1::ELEMENT_FLOAT32);
  for (int n = 0; n < 2; ++n) put[1].mutable_tensor()->add_shape(1 << 20);
  v1::PutTensorsResponse response;
  EXPECT_EQ(ReasonOf(caller_.Put(put, response)), "BAD_SHAPE");
  EXPECT_LT(absl::Now() - begun, absl::Seconds(5)) << calls << " calls";
  EXPECT_LT(ResidentBytes() - before, int64_t{16} << 20);
  EXPECT_EQ(daemon_.server().module_bytes(), module_bytes);
  while (daemon_.server().staging_used() > 0) std::this_thread::yield();  // gRPC lets go late
}

TEST_F(Refusals, OfPutsNameTheMessageThatIsWrong) {
  token_ = RegisterRefused();
  using Messages = std::vector<v1::PutTensorsRequest>;  // header, tensor, chunk, ..., commit
  const auto put = [&](const std::function<void(Messages&)>& spoil) {
    Messages messages =
        PutMessages(token_, 0, [this](int64_t count) { return RandomBytes(random_, count); });
    spoil(messages);
    v1::PutTensorsResponse response;
    return caller_.Put(messages, response);
  };
  const auto tensor = [](Messages& m) { return m[1].mutable_tensor(); };
  const auto chunk = [](Messages& m) { return m[2].mutable_chunk(); };
  const std::tuple<std::function<void(Messages&)>, const char*, const char*> cases[] = {
      {[](Messages& m) { m.erase(m.begin() + 1); }, "CHUNK_ORDER", "chunk"},
      {[](Messages& m) { m.insert(m.begin() + 1, m[0]); }, "CHUNK_ORDER", "header"},
      {[](Messages& m) { m.push_back(m[1]); }, "CHUNK_ORDER", "part"},
      {[](Messages& m) { m.pop_back(); }, "CHUNK_ORDER", "commit"},
      {[](Messages& m) { m[3] = m[1], m[4] = m[2]; }, "BAD_FIELD", "tensor.name"},
      {[&](Messages& m) { chunk(m)->set_tensor(1); }, "BAD_FIELD", "chunk.tensor"},
      {[&](Messages& m) { chunk(m)->set_offset(4); }, "CHUNK_ORDER", "chunk.offset"},
      {[&](Messages& m) { chunk(m)->clear_data(); }, "BAD_FIELD", "chunk.data"},
      {[&](Messages& m) { chunk(m)->mutable_data()->append(4, 0); }, "BAD_FIELD", "chunk.data"},
      {[&](Messages& m) { tensor(m)->clear_element(); }, "BAD_DTYPE", "tensor.element"},
      {[&](Messages& m) { tensor(m)->clear_kind(); }, "BAD_FIELD", "tensor.kind"},
      {[&](Messages& m) { tensor(m)->set_kind(v1::TENSOR_KIND_MOMENT2); }, "BAD_FIELD",
       "tensor.kind"},
      {[](Messages& m) { m.back().mutable_commit()->set_optimizer_step(UINT64_MAX); }, "BAD_FIELD",
       "commit.optimizer_step"},
  };
  int number = 0;
  for (const auto& [spoil, reason, field] : cases) {
    const google::rpc::ErrorInfo info = ErrorInfoOf(put(spoil));
    EXPECT_EQ(info.reason(), reason) << "case " << number;
    EXPECT_EQ(info.metadata().at("field"), field) << "case " << number;
    ++number;
  }
  EXPECT_EQ(caller_.Status(token_).sequence(), 0);
  EXPECT_TRUE(put([](Messages&) {}).ok());
}

TEST_F(Refusals, OfGetsNameTheField) {
  v1::GetTensorsRequest get;
  get.set_token(Ready());
  std::map<std::string, std::string> tensors;
  const auto wrong = [&] { return ErrorInfoOf(caller_.Get(get, tensors)).metadata().at("field"); };
  get.set_shards(65);
  EXPECT_EQ(wrong(), "shards");
  get.clear_shards();
  get.add_name("layer0.weight");
  get.add_name("layer2.weight");
  EXPECT_EQ(wrong(), "name[1]");
  EXPECT_TRUE(tensors.empty());
}

// "at most 1234, ...": 1234.
uint64_t Fits(const grpc::Status& status, const std::string& field) {
  const google::rpc::ErrorInfo info = ErrorInfoOf(status);
  EXPECT_EQ(info.reason(), "MODULE_TOO_LARGE") << status.error_message();
  if (!info.metadata().contains("expected")) return 0;
  EXPECT_EQ(info.metadata().at("field"), field);
  const std::string& expected = info.metadata().at("expected");
  uint64_t fits = 0;
  EXPECT_TRUE(absl::SimpleAtoi(expected.substr(8, expected.find(',') - 8), &fits)) << expected;
  return fits;
}

TEST_F(Refusals, NameTheLimitAndWhatWouldFit) {
  v1::RegisterModuleRequest request = SmallRegistration("large");
  v1::RegisterModuleResponse response;
  request.mutable_limits()->set_kept_rows(uint64_t{1} << 30);
  const uint64_t kept = Fits(caller_.Register(request, response), "limits.kept_rows");
  request.mutable_limits()->set_kept_rows(kept + 1);
  EXPECT_EQ(ReasonOf(caller_.Register(request, response)), "MODULE_TOO_LARGE");
  request.mutable_limits()->set_kept_rows(kept);
  EXPECT_TRUE(caller_.Register(request, response).ok());

  // Calls need staging memory, where modules have far more.
  ServerOptions options = Options();
  options.modules.memory = {int64_t{1} << 40, int64_t{1} << 40};
  Daemon daemon(ReferenceDevice(), options);
  ModuleCaller caller(daemon.NewChannel());
  request.set_dry_run(true);
  request.mutable_limits()->set_kept_rows(0);
  request.mutable_limits()->set_max_rows(uint64_t{1} << 30);
  const uint64_t rows = Fits(caller.Register(request, response), "limits.max_rows");
  EXPECT_EQ(rows, options.admission.memory_bytes / (4 * 4 * kModuleWidth));
  request.mutable_limits()->set_max_rows(rows + 1);
  EXPECT_EQ(Fits(caller.Register(request, response), "limits.max_rows"), rows);
  request.mutable_limits()->set_max_rows(rows);
  EXPECT_TRUE(caller.Register(request, response).ok());
}

// A module lives for some time after each use.
TEST_F(Refusals, LeaveLifetimesWithinTheirLimits) {
  const auto hours = [&](uint32_t ttl_ms) {
    v1::RenewModuleRequest renew;
    v1::RenewModuleResponse renewed;
    renew.set_token(token_);
    renew.set_ttl_ms(ttl_ms);
    const grpc::Status status = caller_.Call(&v1::Modules::Stub::Renew, renew, renewed);
    if (!status.ok()) return ReasonOf(status);
    const absl::Time end =
        absl::FromUnixMillis(static_cast<int64_t>(renewed.status().expires_unix_ms()));
    return absl::StrCat(absl::ToInt64Hours(end - absl::Now() + absl::Minutes(1)));
  };
  token_ = RegisterRefused();
  EXPECT_EQ(hours(0), "1");
  EXPECT_EQ(hours(7200 * 1000), "2");
  EXPECT_EQ(hours(0), "2");
  EXPECT_EQ(hours(UINT32_MAX), "168");  // 49 days
  EXPECT_EQ(hours(999), "BAD_FIELD");
}

}  // namespace
}  // namespace attnd
