// Lists of a mask outside of it (mask_data): in a message, in chunks and in shared memory they mean
// what they mean inside, and what is wrong with them is said before a tensor is looked at.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "proto/attnd/v1/mask_codec.h"
#include "tests/daemon/lease_caller.h"
#include "tests/daemon/masked_request.h"
#include "tests/daemon/shared_memory_caller.h"
#include "tests/daemon/streamed_request.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr int kMaskData = v1::ForwardRequest::kMaskDataFieldNumber;

// Two lists of 400 numbers; each seed has others.
Problem Listed(uint32_t seed = 1) {
  Problem p = SmallProblem(200, 2);
  RowIntervals rows{.r = 2};
  for (uint32_t row = 0; row < 200; ++row) {
    const uint32_t first = row * (7 + seed) % 90, second = 100 + row * seed % 70;
    rows.begin.insert(rows.begin.end(), {first, second});
    rows.end.insert(rows.end.end(), {first + 10, second + 1 + row % 30});
  }
  const absl::Status set = masks::SetMask({.pattern = {std::move(rows)}, .pattern_of = {0}}, p);
  CHECK(set.ok()) << set;
  return p;
}

// The same request with its mask's lists outside.
template <class Request>
Request Split(Request request, const Problem& p) {
  SplitMask split = EncodeSplitMask(p.mask->spec());
  CHECK(split.data.size() > 800) << split.data.size();
  *request.mutable_problem()->mutable_mask() = std::move(split.spec);
  request.set_mask_data(std::move(split.data));
  return request;
}

v1::ForwardRequest SplitForward(const Problem& p) { return Split(MakeForward(p, 1), p); }

v1::ForwardResponse Compute(Daemon& daemon, const v1::ForwardRequest& request) {
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  const grpc::Status status = daemon.stub().Forward(&context, request, &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return reply;
}

// Streams the parts; of a reply, o.
grpc::Status Stream(Daemon& daemon, const std::vector<v1::ForwardStreamRequest>& parts,
                    std::string* o) {
  grpc::ClientContext context;
  auto stream = daemon.stub().ForwardStream(&context);
  for (const auto& part : parts) {
    if (!stream->Write(part)) break;
  }
  stream->WritesDone();
  for (v1::ForwardStreamResponse reply; stream->Read(&reply);) {
    if (reply.chunk().tensor() == v1::ForwardResponse::kOFieldNumber) *o += reply.chunk().data();
  }
  return stream->Finish();
}

std::vector<v1::ForwardStreamRequest> PartsOf(v1::ForwardRequest request, size_t chunk_bytes) {
  std::vector<v1::ForwardStreamRequest> parts(1);
  for (const auto& [tensor, bytes] : TakePayloads(request)) {
    for (size_t at = 0; at < bytes.size(); at += chunk_bytes) {
      parts.push_back(ForwardChunk(tensor, at, bytes.substr(at, chunk_bytes)));
    }
  }
  *parts[0].mutable_header() = std::move(request);
  return parts;
}

TEST(DaemonMaskData, AMaskIsTheSameWhereverItsListsLie) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const Problem p = Listed();
  const v1::ForwardResponse inside = Compute(daemon, MakeForward(p, 1));
  const v1::ForwardResponse outside = Compute(daemon, SplitForward(p));
  EXPECT_EQ(outside.o(), inside.o());
  EXPECT_EQ(outside.lse(), inside.lse());
  for (size_t chunk_bytes : {100u, 100'000u}) {
    std::string o;
    const grpc::Status status = Stream(daemon, PartsOf(SplitForward(p), chunk_bytes), &o);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(o, inside.o());
  }
  EXPECT_EQ(daemon.server().masks().masks, 1);  // one id
  const v1::ForwardResponse named = Compute(daemon, ByMaskId(MakeForward(p, 1), IdOf(p)));
  EXPECT_EQ(named.o(), inside.o());
}

// The thread that decodes has just seen the same problem, byte for byte.
TEST(DaemonMaskData, OtherListsAreAnotherMask) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  const Problem p = Listed(1), other = Listed(2);
  v1::ForwardRequest one = SplitForward(p), two = SplitForward(other);
  ASSERT_EQ(one.problem().SerializeAsString(), two.problem().SerializeAsString());
  ASSERT_LT(one.problem().ByteSizeLong(), 256);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(Compute(daemon, one).o(), Compute(daemon, MakeForward(p, 1)).o());
    EXPECT_EQ(Compute(daemon, two).o(), Compute(daemon, MakeForward(other, 1)).o());
  }
}

TEST(DaemonMaskData, ComesBesideAResidualAndToCompileMask) {
  ServerOptions options = TestOptions();
  options.token_file = TokenFile();
  options.leases.min_hold = absl::Hours(1);
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  LeaseCaller alice(daemon, kAlice);
  const Problem p = Listed();
  const v1::ForwardResponse forward = alice.Keep(p);
  const v1::BackwardRequest whole = MakeBackward(p, 1, forward);
  v1::BackwardResponse expected, gradients;
  ASSERT_TRUE(alice.Backward(whole, &expected).ok());
  const v1::BackwardRequest leased = Split(Leased(whole, forward.residual().token()), p);
  const grpc::Status status = alice.Backward(leased, &gradients);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(gradients.d_q(), expected.d_q());
  EXPECT_EQ(gradients.d_k(), expected.d_k());
  EXPECT_EQ(gradients.d_v(), expected.d_v());

  Daemon open(MakeCpuBackend({.threads = 1}));
  v1::CompileMaskRequest request;
  *request.mutable_problem() = MakeForward(p, 1).problem();
  const auto compile = [&open](const v1::CompileMaskRequest& mask, std::string* id) {
    grpc::ClientContext context;
    v1::CompileMaskResponse reply;
    const grpc::Status compiled = open.stub().CompileMask(&context, mask, &reply);
    *id = reply.id();
    return compiled;
  };
  std::string id;
  ASSERT_TRUE(compile(Split(request, p), &id).ok());
  EXPECT_EQ(id, IdOf(p));
  v1::CompileMaskRequest cut = Split(request, p);
  cut.mutable_mask_data()->pop_back();
  ExpectError(compile(cut, &id), grpc::StatusCode::INVALID_ARGUMENT, "SIZE_MISMATCH");
  request.set_mask_data("x");
  ExpectError(compile(request, &id), grpc::StatusCode::INVALID_ARGUMENT, "SIZE_MISMATCH");
}

// ---- Shared memory.

class SharedMask {
 public:
  SharedMask() : options_(TestOptions()) {
    options_.listen = {UniqueName("unix:/tmp/attnd_mask_data_")};
    daemon_ = std::make_unique<Daemon>(MakeCpuBackend({.threads = 1}), options_);
    control_ = std::make_unique<ControlSocket>(daemon_->address().substr(5) + ".shm");
    const v1::SharedMemoryReply reply = control_->Add(region_);
    CHECK(reply.error().empty()) << reply.error();
    token_ = reply.region();
  }

  // Lists and tensors lie in the region.
  v1::ForwardRequest Request(const Problem& p) {
    v1::ForwardRequest request = SplitForward(p);
    SharedLayout layout(region_, token_, ++use_);
    layout.AddInput(v1::TENSOR_NAME_MASK_DATA, request.mutable_mask_data());
    layout.AddInput(v1::TENSOR_NAME_K, request.mutable_k());
    layout.AddInput(v1::TENSOR_NAME_V, request.mutable_v());
    layout.AddInput(v1::TENSOR_NAME_Q, request.mutable_q());
    *request.mutable_shared_memory() = layout.memory();
    return request;
  }
  Daemon& daemon() { return *daemon_; }

 private:
  ServerOptions options_;
  std::unique_ptr<Daemon> daemon_;
  TestRegion region_{1 << 20};
  std::unique_ptr<ControlSocket> control_;
  std::string token_;
  uint64_t use_ = 0;
};

TEST(DaemonMaskData, LiesInSharedMemory) {
  SharedMask shared;
  const Problem p = Listed();
  const v1::ForwardResponse inside = Compute(shared.daemon(), MakeForward(p, 1));
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(Compute(shared.daemon(), shared.Request(p)).o(), inside.o());
  }
}

TEST(DaemonMaskData, RefusesPlacesInSharedMemory) {
  SharedMask shared;
  const Problem p = Listed();
  using Change = std::function<void(v1::ForwardRequest&)>;
  constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  struct Case {
    const char* name;
    Change change;
    grpc::StatusCode code;
    const char* reason;
  };
  const auto place = [](v1::ForwardRequest& r) {
    return r.mutable_shared_memory()->mutable_tensor(0);
  };
  for (const Case& c : std::vector<Case>{
           {"shorter", [&](auto& r) { place(r)->set_size(100); }, kInvalid, "SIZE_MISMATCH"},
           {"beyond", [&](auto& r) { place(r)->set_offset(1 << 20); }, kInvalid, "BAD_FIELD"},
           {"askew", [&](auto& r) { place(r)->set_offset(4097); }, kInvalid, "BAD_FIELD"},
           {"twice", [](auto& r) { r.set_mask_data("x"); }, kInvalid, "SIZE_MISMATCH"},
           {"unused", [&](auto& r) { *r.mutable_problem() = MakeForward(p, 1).problem(); },
            kInvalid, "SIZE_MISMATCH"},
           {"foreign", [](auto& r) { r.mutable_shared_memory()->set_region(0, "another"); },
            grpc::StatusCode::FAILED_PRECONDITION, "REGION_UNKNOWN"}}) {
    SCOPED_TRACE(c.name);
    v1::ForwardRequest request = shared.Request(p);
    c.change(request);
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    ExpectError(shared.daemon().stub().Forward(&context, request, &reply), c.code, c.reason);
  }
  EXPECT_FALSE(Compute(shared.daemon(), shared.Request(p)).o().empty());
}

// ---- What is refused.

struct DataRefusal {
  const char* name;
  std::function<void(v1::ForwardRequest&)> change;
  grpc::StatusCode code;
  const char* reason;
  const char* message;
};

v1::RowIntervals& RowsOf(v1::ForwardRequest& request) {
  return *request.mutable_problem()->mutable_mask()->mutable_pattern(0)->mutable_row_intervals();
}

std::vector<DataRefusal> RefusedData() {
  constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  constexpr grpc::StatusCode kOutOfRange = grpc::StatusCode::OUT_OF_RANGE;
  return {
      {"truncated", [](auto& r) { r.mutable_mask_data()->pop_back(); }, kInvalid, "SIZE_MISMATCH",
       "mask_data: expected 848 bytes, got 847 bytes"},
      {"too_long", [](auto& r) { r.mutable_mask_data()->push_back(0); }, kInvalid, "SIZE_MISMATCH",
       "mask_data: expected 848 bytes, got 849 bytes"},
      {"absent", [](auto& r) { r.clear_mask_data(); }, kInvalid, "SIZE_MISMATCH",
       "mask_data: expected 848 bytes, got 0 bytes"},
      {"foreign", [](auto& r) { r.mutable_problem()->clear_mask(); }, kInvalid, "SIZE_MISMATCH",
       "mask_data: expected none without lists of problem.mask there, got 848 bytes"},
      {"width", [](auto& r) { RowsOf(r).mutable_begin()->set_entry_bytes(8); }, kInvalid,
       "BAD_FIELD", "row_intervals.begin.entry_bytes: expected 1, 2 or 4, got 8"},
      {"both", [](auto& r) { RowsOf(r).mutable_end()->add_value(1); }, kInvalid, "BAD_FIELD",
       "row_intervals.end.count: expected a list inside the mask or in mask_data, got both"},
      {"count", [](auto& r) { RowsOf(r).mutable_begin()->set_count(399); }, kInvalid, "BAD_FIELD",
       "row_intervals.begin: expected rows·r = 400 entries, got 399"},
      {"values", [](auto& r) { (*r.mutable_mask_data())[0] = 99; }, kInvalid, "BAD_FIELD",
       "row_intervals.begin[0]: expected at most its end 10, got 99"},
      {"large", [](auto& r) { RowsOf(r).mutable_end()->set_count(1 << 20); }, kOutOfRange,
       "MASK_TOO_LARGE",
       "mask_data: expected at most 1048576 bytes (a quarter of --mask_memory_mib), got 1049024"},
      {"huge", [](auto& r) { RowsOf(r).mutable_end()->set_count(uint64_t{1} << 40); }, kOutOfRange,
       "MASK_TOO_LARGE",
       "mask_data: expected at most 1048576 bytes (a quarter of --mask_memory_mib), got"},
      {"absurd", [](auto& r) { RowsOf(r).mutable_end()->set_count(~uint64_t{0}); }, kOutOfRange,
       "MASK_TOO_LARGE",
       "mask_data: expected at most 1048576 bytes (a quarter of --mask_memory_mib), got"},
  };
}

class DaemonMaskDataRefuses : public testing::TestWithParam<DataRefusal> {
 protected:
  static ServerOptions Options() {
    ServerOptions options = TestOptions();
    options.masks.bytes_of_caller = 1 << 20;
    return options;
  }
  Daemon daemon_{MakeCpuBackend({.threads = 1}), Options()};
};

// None of the calls brings tensors: the mask is looked at first.
TEST_P(DaemonMaskDataRefuses, BeforeAnyTensor) {
  v1::ForwardRequest request = SplitForward(Listed());
  request.clear_k();
  request.clear_v();
  request.clear_q();
  GetParam().change(request);
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  const grpc::Status status = daemon_.stub().Forward(&context, request, &reply);
  ExpectError(status, GetParam().code, GetParam().reason);
  EXPECT_TRUE(absl::StrContains(status.error_message(), GetParam().message))
      << status.error_message();
  EXPECT_EQ(daemon_.server().masks().masks, 0);
}

INSTANTIATE_TEST_SUITE_P(All, DaemonMaskDataRefuses, testing::ValuesIn(RefusedData()),
                         [](const auto& test) { return std::string(test.param.name); });

// The server refuses streams by what comes.
TEST(DaemonMaskData, RefusesStreams) {
  ServerOptions options = TestOptions();
  options.masks.bytes_of_caller = 1 << 20;
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  using Parts = std::vector<v1::ForwardStreamRequest>;
  struct Case {
    const char* name;
    std::function<void(Parts&)> change;
    grpc::StatusCode code;
    const char* reason;
    const char* message;
  };
  constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const std::vector<Case> cases = {
      {"half_close", [](Parts& parts) { parts.resize(2); }, kInvalid, "CHUNK_ORDER",
       "mask_data: expected 848 bytes in chunks before half-close, got 500"},
      {"none", [](Parts& parts) { parts.resize(1); }, kInvalid, "CHUNK_ORDER",
       "mask_data: expected 848 bytes in chunks before half-close, got 0"},
      {"tensor_first", [](Parts& parts) { parts.erase(parts.begin() + 1, parts.begin() + 3); },
       kInvalid, "CHUNK_ORDER", "chunk.tensor: expected 15 (mask_data from byte 0), got 20"},
      {"gap", [](Parts& parts) { parts.erase(parts.begin() + 1); }, kInvalid, "CHUNK_ORDER",
       "chunk.offset: expected 0 of mask_data, got 500"},
      {"excess", [](Parts& parts) { parts[2].mutable_chunk()->mutable_data()->push_back(0); },
       kInvalid, "CHUNK_ORDER", "chunk.data: expected at most the 348 bytes"},
      {"two_headers", [](Parts& parts) { parts[1] = parts[0]; }, kInvalid, "CHUNK_ORDER",
       "header: expected one header, got two"},
      {"payload", [](Parts& parts) { parts[0].mutable_header()->set_mask_data("x"); }, kInvalid,
       "BAD_FIELD", "mask_data: expected no payload in the header of a streamed call, got 1 bytes"},
      {"values", [](Parts& parts) { (*parts[1].mutable_chunk()->mutable_data())[0] = 99; },
       kInvalid, "BAD_FIELD", "row_intervals.begin[0]: expected at most its end 10, got 99"},
      {"large",
       [](Parts& parts) { RowsOf(*parts[0].mutable_header()).mutable_end()->set_count(1 << 20); },
       grpc::StatusCode::OUT_OF_RANGE, "MASK_TOO_LARGE", "mask_data: expected at most 1048576"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Parts parts = PartsOf(SplitForward(Listed()), 500);
    c.change(parts);
    std::string o;
    const grpc::Status status = Stream(daemon, parts, &o);
    ExpectError(status, c.code, c.reason);
    EXPECT_TRUE(absl::StrContains(status.error_message(), c.message)) << status.error_message();
  }
  EXPECT_EQ(daemon.server().masks().masks, 0);
  EXPECT_EQ(daemon.server().use().calls, 0);
}

// One stream keeps the room of a caller; what is over comes back.
TEST(DaemonMaskData, AStreamThatWaitsTakesRoom) {
  ServerOptions options = TestOptions();
  options.masks.bytes_of_caller = 1000;
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  std::vector<v1::ForwardStreamRequest> parts = PartsOf(SplitForward(Listed()), 500);
  std::string o;
  {
    grpc::ClientContext context;
    auto first = daemon.stub().ForwardStream(&context);
    first->Write(parts[0]);
    first->Write(parts[1]);
    const absl::Time until = absl::Now() + absl::Seconds(20);
    grpc::Status refused;
    while (absl::Now() < until && refused.ok()) refused = Stream(daemon, parts, &o);
    ExpectError(refused, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_QUOTA");
    context.TryCancel();
    first->Finish();
  }
  grpc::Status status;
  const absl::Time until = absl::Now() + absl::Seconds(20);
  do {
    o.clear();
    status = Stream(daemon, parts, &o);
  } while (!status.ok() && absl::Now() < until);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(o, Compute(daemon, MakeForward(Listed(), 1)).o());
}

}  // namespace
}  // namespace attnd
