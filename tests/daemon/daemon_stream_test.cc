// ForwardStream and BackwardStream against a real server: the same bytes as unary calls at odd
// sizes and chunkings, every violation of the chunks' order, streams abandoned at each state, peers
// that fall silent or asleep, and calls too large for one message.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/streamed_request.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/gated_daemon.h"
#include "tests/fixtures/raw_http2.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

// Puts a streamed reply together; its chunks must come in order.
template <class Response, class Stream>
grpc::Status ReadReply(Stream& stream, Response& whole) {
  using StreamResponse = std::conditional_t<std::is_same_v<Response, v1::ForwardResponse>,
                                            v1::ForwardStreamResponse, v1::BackwardStreamResponse>;
  StreamResponse message;
  bool first = true;
  int last_tensor = 0;
  while (stream.Read(&message)) {
    EXPECT_EQ(message.has_header(), first);
    if (message.has_header()) {
      whole = message.header();
    } else {
      const v1::PayloadChunk& chunk = message.chunk();
      int tensor = static_cast<int>(chunk.tensor());
      EXPECT_GE(tensor, last_tensor);
      last_tensor = tensor;
      const auto* field = whole.GetDescriptor()->FindFieldByNumber(tensor);
      std::string bytes = whole.GetReflection()->GetString(whole, field);
      EXPECT_EQ(chunk.offset(), bytes.size());
      EXPECT_LE(chunk.data().size(), size_t{4} << 20);
      whole.GetReflection()->SetString(&whole, field, bytes + chunk.data());
    }
    first = false;
  }
  return stream.Finish();
}

// Sends a whole request in chunks of at most `chunk_bytes()` bytes.
template <class StreamRequest, class Request, class Stream>
void SendStreamed(Stream& stream, Request request, const std::function<size_t()>& chunk_bytes) {
  auto payloads = TakePayloads(request);
  StreamRequest header;
  *header.mutable_header() = std::move(request);
  stream.Write(header);
  for (const auto& [tensor, bytes] : payloads) {
    for (size_t at = 0; at < bytes.size();) {
      std::string data = bytes.substr(at, chunk_bytes());
      size_t size = data.size();
      stream.Write(Chunk<StreamRequest>(tensor, at, std::move(data)));
      at += size;
    }
  }
  stream.WritesDone();
}

template <class StreamRequest, class Request, class Response, class Stream>
grpc::Status CallStreamed(Stream& stream, const Request& request, Response& response,
                          const std::function<size_t()>& chunk_bytes) {
  SendStreamed<StreamRequest>(stream, request, chunk_bytes);
  return ReadReply(stream, response);
}

grpc::Status ForwardStreamed(v1::Attention::Stub& stub, const v1::ForwardRequest& request,
                             v1::ForwardResponse& response,
                             const std::function<size_t()>& chunk_bytes) {
  grpc::ClientContext context;
  auto stream = stub.ForwardStream(&context);
  return CallStreamed<v1::ForwardStreamRequest>(*stream, request, response, chunk_bytes);
}

TEST(DaemonStream, AnswersByteForByteAsItsEngineWhateverTheChunks) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  ReferenceBackend engine;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 10, .max_head_dim = 32});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    Random random(seed);
    auto chunk_bytes = [&] { return static_cast<size_t>(random.Between(1, 700)); };
    v1::ForwardRequest request = MakeForward(problem, seed);
    v1::ForwardResponse expected = ComputeForward(engine, problem, request), got;
    grpc::Status status = ForwardStreamed(daemon.stub(), request, got, chunk_bytes);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(got.o(), expected.o());
    EXPECT_EQ(got.lse(), expected.lse());
    EXPECT_FALSE(got.receipt().backend().empty());

    v1::BackwardRequest backward = MakeBackward(problem, seed, expected);
    v1::BackwardResponse expected_gradients = ComputeBackward(engine, problem, backward), gradients;
    backward.set_d_lse_follows(!backward.d_lse().empty());
    grpc::ClientContext context;
    auto stream = daemon.stub().BackwardStream(&context);
    status = CallStreamed<v1::BackwardStreamRequest>(*stream, backward, gradients, chunk_bytes);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(gradients.d_k(), expected_gradients.d_k());
    EXPECT_EQ(gradients.d_v(), expected_gradients.d_v());
    EXPECT_EQ(gradients.d_q(), expected_gradients.d_q());
    EXPECT_EQ(gradients.d_bias(), expected_gradients.d_bias());
    EXPECT_EQ(gradients.d_sink(), expected_gradients.d_sink());
  }
  WaitUntilAllIsGivenBack(daemon);
}

TEST(DaemonStream, TakesAndGivesMoreThanOneMessageHolds) {
  ServerOptions options = TestOptions();
  options.transport.max_message_bytes = int64_t{5} << 20;
  Daemon daemon(MakeCpuBackend({.threads = 2}), options);
  auto engine = MakeCpuBackend({.threads = 1});
  Problem problem = SmallProblem(30011, 2);  // 9.6 MB each of q and o; few keys
  problem.qk_head_dim = problem.v_head_dim = 40;
  problem.kv_len = 3;
  v1::ForwardRequest request = MakeForward(problem, 3);
  v1::ForwardResponse expected = ComputeForward(*engine, problem, request), got;
  grpc::Status status =
      ForwardStreamed(daemon.stub(), request, got, [] { return size_t{4} << 20; });
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(got.o() == expected.o());
  EXPECT_TRUE(got.lse() == expected.lse());
}

TEST(DaemonStream, AnswersInChunksAsLargeAsTheRequests) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  Problem problem = SmallProblem(70000, 2);  // 9 MB of o; one key
  problem.kv_len = 1;
  const v1::ForwardRequest request = MakeForward(problem, 3);
  const std::pair<size_t, size_t> sent_and_got[] = {
      {300'000, 1 << 20},
      {1 << 20, 1 << 20},
      {2 << 20, 2 << 20},
      {4 << 20, (4 << 20) - (64 << 10)},  // with its prefix what gRPC takes by default
  };
  for (const auto& [sent, expected] : sent_and_got) {
    grpc::ClientContext context;
    auto stream = daemon.stub().ForwardStream(&context);
    SendStreamed<v1::ForwardStreamRequest>(*stream, request, [size = sent] { return size; });
    size_t got = 0;
    v1::ForwardStreamResponse message;
    while (stream->Read(&message)) got = std::max(got, message.chunk().data().size());
    EXPECT_TRUE(stream->Finish().ok());
    EXPECT_EQ(got, expected) << sent;
  }
}

// One stream of a test, and what the server says to it.
struct Violation {
  std::string name;
  std::vector<v1::ForwardStreamRequest> messages;
  std::string reason, message;
};

std::vector<Violation> Violations() {
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);  // 1024 bytes each of k, v, q
  v1::ForwardStreamRequest header = HeaderOf(request), whole, bad = header, unknown = header;
  *whole.mutable_header() = request;
  bad.mutable_header()->mutable_problem()->set_kv_heads(3);
  unknown.mutable_header()->mutable_problem()->set_element(static_cast<v1::Element>(9));
  auto full = [](int tensor) { return ForwardChunk(tensor, 0, std::string(1024, 'x')); };
  v1::ForwardStreamRequest half = ForwardChunk(kK, 0, std::string(512, 'x'));
  return {
      {"NoHeader", {}, "CHUNK_ORDER", "header: expected a header before half-close, got none"},
      {"ChunkFirst",
       {full(kK)},
       "CHUNK_ORDER",
       "header: expected a header before the first chunk, got a chunk"},
      {"HeaderTwice", {header, header}, "CHUNK_ORDER", "header: expected one header, got two"},
      {"HeaderInTheMiddle",
       {header, half, header},
       "CHUNK_ORDER",
       "header: expected one header, got two"},
      {"EmptyMessage",
       {v1::ForwardStreamRequest()},
       "BAD_FIELD",
       "part: expected a header or a chunk, got neither"},
      {"PayloadInHeader",
       {whole},
       "BAD_FIELD",
       "k: expected no payload in the header of a streamed call, got 1024 bytes"},
      {"UnknownElement",
       {unknown},
       "BAD_DTYPE",
       "problem.element: expected ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32, got 9"},
      {"BadProblem",
       {bad},
       "BAD_SHAPE",
       "problem.kv_heads: expected a divisor of q_heads = 2, got 3"},
      {"WrongOrder",
       {header, full(kV)},
       "CHUNK_ORDER",
       "chunk.tensor: expected 20 (k from byte 0), got 21"},
      {"Gap",
       {header, half, ForwardChunk(kK, 513, "x")},
       "CHUNK_ORDER",
       "chunk.offset: expected 512 of k, got 513"},
      {"Overlap", {header, half, half}, "CHUNK_ORDER", "chunk.offset: expected 512 of k, got 0"},
      {"Excess",
       {header, ForwardChunk(kK, 0, std::string(1025, 'x'))},
       "CHUNK_ORDER",
       "chunk.data: expected at most the 1024 bytes that are left of k, got 1025"},
      {"EmptyChunk",
       {header, ForwardChunk(kK, 0, "")},
       "BAD_FIELD",
       "chunk.data: expected 1..4194304 bytes, got 0"},
      {"HalfCloseAfterHeader",
       {header},
       "CHUNK_ORDER",
       "k: expected 1024 bytes in chunks before half-close, got 0"},
      {"HalfCloseTooEarly",
       {header, full(kK), full(kV), ForwardChunk(kQ, 0, "x")},
       "CHUNK_ORDER",
       "q: expected 1024 bytes in chunks before half-close, got 1"},
      {"ChunkAfterTheLast",
       {header, full(kK), full(kV), full(kQ), ForwardChunk(kQ, 1024, "x")},
       "CHUNK_ORDER",
       "chunk: expected half-close after the last payload, got a chunk of field 22"},
      {"UnknownTensor",
       {header, full(99)},
       "CHUNK_ORDER",
       "chunk.tensor: expected 20 (k from byte 0), got 99"},
  };
}

TEST(DaemonStream, NamesEachViolationAndGivesEverythingBack) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  for (const Violation& violation : Violations()) {
    SCOPED_TRACE(violation.name);
    grpc::ClientContext context;
    auto stream = daemon.stub().ForwardStream(&context);
    for (const auto& message : violation.messages) stream->Write(message);
    stream->WritesDone();
    v1::ForwardResponse reply;
    grpc::Status status = ReadReply(*stream, reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), violation.message);
    EXPECT_EQ(ErrorInfoOf(status).reason(), violation.reason);
    WaitUntilAllIsGivenBack(daemon);
  }
  ExpectRecovered(daemon);
}

// Another call, of which only the header has come, takes room too.
TEST(DaemonStream, RefusesOnTheHeaderAlone) {
  struct Case {
    const char* reason;
    grpc::StatusCode code;
    std::function<void(AdmissionLimits&)> limit;
    int64_t other_length, length;
  };
  const auto no_limit = [](AdmissionLimits&) {};
  const Case cases[] = {
      {"TOO_LARGE_FOR_DEVICE", grpc::StatusCode::OUT_OF_RANGE, no_limit, 16, 1 << 20},
      {"MEMORY_PRESSURE", grpc::StatusCode::UNAVAILABLE,
       [](AdmissionLimits& l) { l.memory_bytes = l.caller_max_bytes = 8000; }, 16, 16},
      {"QUEUE_FULL", grpc::StatusCode::UNAVAILABLE, [](AdmissionLimits& l) { l.max_calls = 1; }, 16,
       16},
      {"QUEUE_FULL", grpc::StatusCode::UNAVAILABLE,
       [](AdmissionLimits& l) { l.max_queue_seconds = 1e-9; }, 4096, 16},
      {"TENANT_QUOTA", grpc::StatusCode::RESOURCE_EXHAUSTED,
       [](AdmissionLimits& l) { l.caller_max_calls = 1; }, 16, 16},
      {"TENANT_QUOTA", grpc::StatusCode::RESOURCE_EXHAUSTED,
       [](AdmissionLimits& l) { l.caller_max_bytes = 8000; }, 16, 16},
      {"DEADLINE_UNMEETABLE", grpc::StatusCode::DEADLINE_EXCEEDED, no_limit, 16, 1 << 15},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.reason);
    ServerOptions options = TestOptions();
    c.limit(options.admission);
    Daemon daemon(std::make_unique<GatedBackend>(), options);
    grpc::ClientContext other_context, context;
    auto other = daemon.stub().ForwardStream(&other_context);
    other->Write(HeaderOf(MakeForward(SmallProblem(c.other_length), 1)));
    while (daemon.server().use().calls == 0) std::this_thread::yield();
    const auto header = HeaderOf(MakeForward(SmallProblem(c.length), 1));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    auto stream = daemon.stub().ForwardStream(&context);
    stream->Write(header);  // no chunk, no half-close
    v1::ForwardResponse reply;
    grpc::Status status = ReadReply(*stream, reply);
    EXPECT_EQ(status.error_code(), c.code) << status.error_message();
    EXPECT_EQ(ErrorInfoOf(status).reason(), c.reason) << status.error_message();
    other_context.TryCancel();
    other->Finish();
    ExpectRecovered(daemon);
  }
}

// A refused call's chunks are on their way still when another call gets the memory that its header
// lay in, and the places that it would have had.
TEST(DaemonStream, KeepsCallsApartThatAreRefusedBesideOthers) {
  ServerOptions options = TestOptions();
  options.listen = {UniqueName("unix:/tmp/attnd_stream_")};
  options.admission.memory_bytes = options.admission.caller_max_bytes = 40 << 20;  // two calls
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  const auto engine = MakeCpuBackend({.threads = 1});
  Problem problem = SmallProblem(1 << 17);  // 8 MiB of q and of o
  problem.kv_len = 16;
  std::atomic<int> answered{0}, refused{0};
  std::vector<std::thread> callers;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    v1::ForwardRequest request = MakeForward(problem, seed);
    callers.emplace_back([&, request, expected = ComputeForward(*engine, problem, request)] {
      auto stub = daemon.NewStub();
      for (int n = 0; n < 10; ++n) {
        v1::ForwardResponse got;
        grpc::Status status = ForwardStreamed(*stub, request, got, [] { return 500000; });
        if (!status.ok()) {
          EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
          ++refused;
          continue;
        }
        ++answered;
        ASSERT_TRUE(got.o() == expected.o() && got.lse() == expected.lse()) << "call " << n;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(answered, 0);
  EXPECT_GT(refused, 0);
  ExpectRecovered(daemon);
}

TEST(DaemonStream, HoldsItsMemoryFromTheHeaderOn) {
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = 4224;  // one call
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  grpc::ClientContext context;
  auto stream = daemon.stub().ForwardStream(&context);
  stream->Write(HeaderOf(MakeForward(SmallProblem(), 1)));
  while (daemon.server().staging_used() != 4224) std::this_thread::yield();
  v1::ForwardResponse reply;
  grpc::ClientContext other;
  grpc::Status status = daemon.stub().Forward(&other, MakeForward(SmallProblem(), 1), &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ErrorInfoOf(status).reason(), "MEMORY_PRESSURE");
  context.TryCancel();
  stream->Finish();
  ExpectRecovered(daemon);
}

TEST(DaemonStream, GivesEverythingBackWhenAbandonedAtAnyState) {
  GatedDaemon gated;
  Daemon& daemon = *gated.daemon;
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  const std::vector<v1::ForwardStreamRequest> messages = {
      HeaderOf(request), ForwardChunk(kK, 0, request.k()), ForwardChunk(kV, 0, request.v()),
      ForwardChunk(kQ, 0, request.q())};
  gated.engine->Close();
  for (size_t sent = 0; sent <= messages.size() + 1; ++sent) {  // the last: in the kernel
    SCOPED_TRACE(sent);
    grpc::ClientContext context;
    auto stream = daemon.stub().ForwardStream(&context);
    for (size_t n = 0; n < std::min(sent, messages.size()); ++n) stream->Write(messages[n]);
    if (sent > messages.size()) {
      stream->WritesDone();
      gated.WaitForLaunches(1);
    } else if (sent > 0) {
      while (daemon.server().staging_used() == 0) std::this_thread::yield();
    }
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    WaitUntilAllIsGivenBack(daemon);
  }
  gated.engine->Open();
  ExpectRecovered(daemon);
}

TEST(DaemonStream, CutsASenderThatFallsSilentAtAnyState) {
  ServerOptions options = TestOptions();
  options.transport.transfers.idle = absl::Milliseconds(60);
  Daemon daemon(std::make_unique<ReferenceBackend>(), WithMetrics(options));
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  const std::vector<v1::ForwardStreamRequest> messages = {HeaderOf(request),
                                                          ForwardChunk(kK, 0, request.k())};
  for (size_t sent = 0; sent <= messages.size(); ++sent) {
    SCOPED_TRACE(sent);
    grpc::ClientContext context;
    auto stream = daemon.stub().ForwardStream(&context);
    for (size_t n = 0; n < sent; ++n) stream->Write(messages[n]);
    v1::ForwardResponse reply;
    grpc::Status status = ReadReply(*stream, reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_EQ(ErrorInfoOf(status).reason(), "STREAM_IDLE");
    WaitUntilAllIsGivenBack(daemon);
  }
  const Counts counts(daemon);
  EXPECT_EQ(counts.Of("attnd_calls_cut_total", {{"stage", "receive"}, {"reason", "idle"}}), 3);
  EXPECT_EQ(counts.Of("attnd_calls_cut_total", {}), 3);
  ExpectRecovered(daemon);
}

TEST(DaemonStream, CutsASenderThatIsBelowTheRate) {
  ServerOptions options = TestOptions();
  options.transport.transfers = {.idle = absl::Seconds(1), .min_bytes_per_second = 1 << 30};
  options.admission.max_deadline = absl::Hours(100);  // 2^34 pairs: hours of a busy machine
  Daemon daemon(std::make_unique<ReferenceBackend>(), WithMetrics(options));
  Problem problem = SmallProblem(1 << 17);         // k: 4 MiB
  problem.window_left = problem.window_right = 8;  // all of it would take the engine 20 minutes
  v1::ForwardRequest request = MakeForward(problem, 1);
  grpc::ClientContext context;
  auto stream = daemon.stub().ForwardStream(&context);
  bool open = stream->Write(HeaderOf(request));
  for (size_t at = 0; open && at < request.k().size(); at += 4) {  // 2 M chunks
    open = stream->Write(ForwardChunk(kK, at, request.k().substr(at, 4)));
  }
  EXPECT_EQ(ErrorInfoOf(stream->Finish()).reason(), "STREAM_TOO_SLOW");
  const Labels labels = {{"stage", "receive"}, {"reason", "too_slow"}};
  EXPECT_EQ(Counts(daemon).Of("attnd_calls_cut_total", labels), 1);
  ExpectRecovered(daemon);
}

TEST(DaemonStream, CutsAReaderThatNeverReads) {
  ServerOptions options = TestOptions();
  options.transport.transfers.idle = absl::Milliseconds(500);
  Daemon daemon(MakeCpuBackend({.threads = 1}), WithMetrics(options));
  Problem problem = SmallProblem(1 << 16, 2);  // 4 MiB back, more than a window
  problem.kv_len = 1;
  v1::ForwardRequest request = MakeForward(problem, 1);
  auto payloads = TakePayloads(request);
  grpc::ClientContext context;
  auto stream = daemon.stub().ForwardStream(&context);
  v1::ForwardStreamRequest header;
  *header.mutable_header() = request;
  stream->Write(header);
  for (const auto& [tensor, bytes] : payloads) stream->Write(ForwardChunk(tensor, 0, bytes));
  stream->WritesDone();
  EXPECT_NE(daemon.server().staging_used(), 0);
  WaitUntilAllIsGivenBack(daemon);  // although nobody has read a byte
  const Labels labels = {{"stage", "send"}, {"reason", "idle"}};
  EXPECT_EQ(Counts(daemon).Of("attnd_calls_cut_total", labels), 1);
  context.TryCancel();
  stream->Finish();
  ExpectRecovered(daemon);
}

// A streamed call of 8 MiB each way, one MiB at a time, while the clock moves by kStep before each.
class PacedStream : public testing::Test {
 protected:
  static constexpr absl::Duration kIdle = absl::Milliseconds(40), kStep = absl::Milliseconds(30);
  static constexpr size_t kMib = 1 << 20, kMibs = 8;
  static constexpr int64_t kRate = int64_t{kMib} * 1000 / 30;  // of its bytes a second

  void Start(int64_t min_bytes_per_second) {
    ServerOptions options = TestOptions();
    options.transport.transfers = {.idle = kIdle, .min_bytes_per_second = min_bytes_per_second};
    daemon_.emplace(MakeCpuBackend({.threads = 1}), WithMetrics(options), clock_);
    Problem problem = SmallProblem(1 << 17);
    problem.kv_len = 1;
    request_ = MakeForward(problem, 1);
    request_.set_want_lse(false);
    peer_ = std::make_unique<RawHttp2>(daemon_->address());
    silent_ = std::make_unique<RawHttp2>(daemon_->address());
    for (RawHttp2* one : {peer_.get(), silent_.get()}) {
      one->Greet();
      while (!one->acknowledged()) one->Read(100);
    }
    peer_->StartCall(1, kMethod);
    Send(Framed(HeaderOf(request_)) + Framed(ForwardChunk(kK, 0, request_.k())) +
         Framed(ForwardChunk(kV, 0, request_.v())));
  }

  void Send(std::string bytes) {
    while (!bytes.empty() && !peer_->ended()) {
      bytes.erase(0, peer_->SendData(1, bytes));
      peer_->Read(1);
    }
  }
  void SendMib(size_t n) {
    Send(Framed(ForwardChunk(kQ, n * kMib, request_.q().substr(n * kMib, kMib))));
  }
  void HalfClose() { peer_->Send(RawHttp2::kData, RawHttp2::kEndStream, 1, ""); }
  // And waits until the reply has begun.
  void SendAll() {
    for (size_t n = 0; n < kMibs; ++n) SendMib(n);
    HalfClose();
    while (peer_->answers() == 0) peer_->Read(100);
    waiting_ = 0;
  }
  // The window is larger than all that is no payload, so the daemon is at the next MiB then.
  void ReadMib(size_t n) {
    peer_->Grant(1, kMib);
    while (peer_->bytes_of(1) < static_cast<int64_t>(65535 + (n + 1) * kMib) && !IsOver()) {
      peer_->Read(100);
    }
  }
  bool IsOver() const { return peer_->ended() || peer_->resets() > 0 || peer_->answers() > 1; }

  // Moves the clock twice, each time after `move`, and waits until all streams were looked at: one
  // that begins now and stays silent is cut.
  template <class Move>
  void TwoSteps(Move move) {
    const uint32_t stream = next_silent_;
    next_silent_ += 2;
    WaitForCalls(waiting_);
    silent_->StartCall(stream, kMethod);
    silent_->SendData(stream, Framed(HeaderOf(MakeForward(SmallProblem(), 1))));
    WaitForCalls(waiting_ + 1);
    const int answers = silent_->answers();
    for (int step = 0; step < 2; ++step) {
      move();
      clock_.Advance(kStep);
    }
    while (silent_->answers() == answers) silent_->Read(100);
    peer_->ReadWhatIsThere();
  }

  // Admitted and not computed.
  void WaitForCalls(int64_t calls) {
    while (daemon_->server().use().calls != calls) std::this_thread::yield();
  }

  double Cut(const char* stage, const char* reason) {
    return Counts(*daemon_).Of("attnd_calls_cut_total", {{"stage", stage}, {"reason", reason}});
  }

  static constexpr char kMethod[] = "/attnd.v1.Attention/ForwardStream";
  FakeClock clock_{absl::Now()};
  std::optional<Daemon> daemon_;
  v1::ForwardRequest request_;
  std::unique_ptr<RawHttp2> peer_, silent_;
  uint32_t next_silent_ = 1;
  int64_t waiting_ = 1;  // calls, beside the silent one
};

TEST_F(PacedStream, IsNotCutWhenItsCallerReadsSlowlyButSteadily) {
  Start(kRate * 3 / 4);
  SendAll();
  size_t read = 0;
  while (read < kMibs - 2) {
    TwoSteps([&] { ReadMib(read++); });
    ASSERT_FALSE(IsOver()) << read;
  }
  EXPECT_EQ(Cut("send", "idle") + Cut("send", "too_slow"), 0);
  EXPECT_EQ(Cut("receive", "idle"), read / 2);  // the silent ones
  for (; read < kMibs; ++read) ReadMib(read);
  while (peer_->answers() < 2) peer_->Read(100);
  EXPECT_GE(peer_->bytes_of(1), static_cast<int64_t>(kMibs * kMib));
}

TEST_F(PacedStream, IsCutWhenItsCallerReadsSteadilyBelowTheRate) {
  Start(kRate * 4);
  SendAll();
  size_t read = 0;
  TwoSteps([&] { ReadMib(read++); });
  while (!IsOver()) peer_->Read(100);
  EXPECT_LT(peer_->bytes_of(1), static_cast<int64_t>(kMibs * kMib));
  EXPECT_EQ(Cut("send", "too_slow"), 1);
  EXPECT_EQ(Cut("send", "idle"), 0);
}

TEST_F(PacedStream, IsNotCutWhenItsCallerSendsSlowlyButSteadily) {
  Start(kRate * 3 / 4);
  size_t sent = 0;
  const Counts counts(*daemon_);
  auto send_mib = [&] {
    const double before = counts.Of("attnd_received_bytes_total", {});
    SendMib(sent++);
    while (counts.Of("attnd_received_bytes_total", {}) < before + kMib && !IsOver()) {
      peer_->Read(1);
    }
  };
  while (sent < kMibs) {
    TwoSteps(send_mib);
    ASSERT_FALSE(IsOver()) << sent;
  }
  EXPECT_EQ(Cut("receive", "idle"), sent / 2);  // the silent ones
  EXPECT_EQ(Cut("receive", "too_slow"), 0);
  HalfClose();
  peer_->Grant(1, 2 * kMibs * kMib);
  while (peer_->answers() < 2) peer_->Read(100);
  EXPECT_GE(peer_->bytes_of(1), static_cast<int64_t>(kMibs * kMib));
}

TEST_F(PacedStream, IsCutWhenItsCallerSendsAllTheTimeAndCompletesNoChunk) {
  Start(1);
  const std::string chunk = Framed(ForwardChunk(kQ, 0, request_.q().substr(0, kMib)));
  size_t sent = 0;
  TwoSteps([&] {
    Send(chunk.substr(sent, 100000));
    sent += 100000;
  });
  while (peer_->answers() == 0 && !peer_->ended()) peer_->Read(100);
  EXPECT_EQ(Cut("receive", "idle"), 2);  // with the silent one
}

// Whatever is changed in their bytes, lengths and flags of messages included.
TEST(DaemonStream, AnswersStreamsWhoseBytesAreDamaged) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  const Problem problem = SmallProblem(64, 2);
  v1::ForwardRequest request = MakeForward(problem, 1);
  std::string whole = Framed(HeaderOf(request));
  std::vector<size_t> begins = {0};  // of messages
  for (auto [tensor, bytes] :
       {std::pair(kK, &request.k()), std::pair(kV, &request.v()), std::pair(kQ, &request.q())}) {
    for (size_t at = 0; at < bytes->size(); at += 1500) {
      begins.push_back(whole.size());
      whole += Framed(ForwardChunk(tensor, at, bytes->substr(at, 1500)));
    }
  }
  std::unique_ptr<RawHttp2> peer;
  uint32_t stream = 1;
  int results = 0, errors = 0;
  for (uint64_t seed = 0; seed < 100; ++seed, stream += 2) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    auto below = [&](size_t size) {
      return static_cast<size_t>(random.Between(0, static_cast<int64_t>(size) - 1));
    };
    if (peer == nullptr || peer->ended()) {
      peer = std::make_unique<RawHttp2>(daemon.address());
      peer->Greet();
      while (!peer->acknowledged()) peer->Read(100);
      stream = 1;
    }
    std::string bytes = whole;
    for (int64_t flips = random.Between(1, 2); flips > 0; --flips) {
      const bool payload = random.Chance(0.5);
      const size_t at = payload ? below(whole.size()) : begins[below(begins.size())] + below(16);
      bytes[at] = static_cast<char>(random.Bits());
    }
    if (random.Chance(0.2)) bytes.resize(below(bytes.size()) + 1);
    peer->StartCall(stream, "/attnd.v1.Attention/ForwardStream");
    peer->Grant(stream, 8192);
    const auto over = [&] { return peer->ended() || peer->is_over(stream); };
    for (size_t at = 0, step = 0; at < bytes.size() && !over(); at += step) {
      step = peer->SendData(stream, bytes.substr(at, 1 + below(4000)));
      peer->Read(step == 0 ? 10 : 0);
    }
    peer->Send(RawHttp2::kData, RawHttp2::kEndStream, stream, "");
    while (!over()) peer->Read(100);
    ++(peer->bytes_of(stream) > 0 ? results : errors);
  }
  EXPECT_GT(results, 10);
  EXPECT_GT(errors, 10);
  peer.reset();
  ExpectRecovered(daemon);
}

TEST(DaemonStream, SurvivesStreamsCancelledAtRandomTimes) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&daemon, t] {
      auto stub = daemon.NewStub();
      Random random(t);
      for (int n = 0; n < 40; ++n) {
        v1::ForwardRequest request = MakeForward(SmallProblem(random.Between(1, 512)), 1);
        grpc::ClientContext context;
        auto stream = stub->ForwardStream(&context);
        std::thread canceller([&context, spin = random.Between(0, 3000)] {
          for (int64_t left = spin; left > 0; --left) std::this_thread::yield();
          context.TryCancel();
        });
        v1::ForwardResponse reply;
        grpc::StatusCode code = CallStreamed<v1::ForwardStreamRequest>(*stream, request, reply, [] {
                                  return size_t{3000};
                                }).error_code();
        EXPECT_TRUE(code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED) << code;
        canceller.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectRecovered(daemon);
}

// Valid streams with one random damage: an error with its reason, or the right answer.
TEST(DaemonStream, AnswersDamagedStreamsWithAStatusWhenDamageIsRandom) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    std::vector<v1::ForwardStreamRequest> messages = {HeaderOf(request)};
    for (auto [tensor, bytes] :
         {std::pair(kK, &request.k()), std::pair(kV, &request.v()), std::pair(kQ, &request.q())}) {
      for (size_t at = 0; at < bytes->size(); at += 300) {
        messages.push_back(ForwardChunk(tensor, at, bytes->substr(at, 300)));
      }
    }
    size_t at = static_cast<size_t>(random.Between(0, static_cast<int64_t>(messages.size()) - 1));
    size_t other =
        static_cast<size_t>(random.Between(0, static_cast<int64_t>(messages.size()) - 1));
    switch (random.Between(0, 4)) {
      case 0:
        messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 1:
        messages.insert(messages.begin() + static_cast<std::ptrdiff_t>(other), messages[at]);
        break;
      case 2:
        std::swap(messages[at], messages[other]);
        break;
      case 3:
        messages[at].mutable_chunk()->set_offset(static_cast<uint64_t>(random.Between(0, 1200)));
        break;
      default:
        messages[at].mutable_chunk()->mutable_data()->push_back('x');
    }
    grpc::ClientContext context;
    auto stream = daemon.stub().ForwardStream(&context);
    for (const auto& message : messages) stream->Write(message);
    stream->WritesDone();
    v1::ForwardResponse reply;
    grpc::Status status = ReadReply(*stream, reply);
    if (status.ok()) continue;
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_FALSE(ErrorInfoOf(status).reason().empty());
  }
  ExpectRecovered(daemon);
}

}  // namespace
}  // namespace attnd
