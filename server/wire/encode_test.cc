#include "server/wire/encode.h"

#include <gtest/gtest.h>

#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "proto/attnd/v1/attention.pb.h"
#include "server/schedule/device_worker.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

// Runs one call and gives its Result, which only a DeviceWorker can make.
class EncodeTest : public testing::Test {
 protected:
  EncodeTest()
      : staging_(*StagingPool::Create(1 << 20)),
        cost_(1e9),
        admission_({}, backend_, cost_, clock_) {
    metrics_.AddDevice("gated", backend_.info());
  }

  Result Run(const Problem& problem) { return Run(MakeForward(problem, 1)); }
  Result Run(const v1::ForwardRequest& request) {
    DeviceWorker worker({backend_, cost_, metrics_, clock_}, {});
    KeptAnswer answer;
    auto call =
        admission_.Admit(DecodedRequest(request, Direction::kForward),
                         {.id = 1, .caller = "a", .received_at = clock_.Now(), .sink = &answer});
    worker.Submit(Landed(std::move(call), staging_));
    CHECK(answer.Wait().ok());
    return std::move(answer.result());
  }

  RealClock clock_;
  GatedBackend backend_;
  Metrics metrics_;
  StagingPool staging_;
  CostModel cost_;
  Admission admission_;
  const std::shared_ptr<TransferProgress> progress_ = std::make_shared<TransferProgress>(clock_);
};

TEST_F(EncodeTest, WrapsTheStagingMemoryWithoutCopyingIt) {
  Result result = Run(SmallProblem());
  const std::byte* o = result.output(Tensor::kO);
  Reply reply = Encode(std::move(result), backend_.info(), clock_.Now(), progress_);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(reply.bytes.Dump(&slices).ok());
  bool found = false;
  for (const grpc::Slice& slice : slices) {
    found = found || reinterpret_cast<const std::byte*>(slice.begin()) == o;
  }
  EXPECT_TRUE(found);
  EXPECT_EQ(reply.payload_bytes, 1024 + 128);
}

TEST_F(EncodeTest, GivesMemoryAndBudgetBackWithTheLastSlice) {
  Reply reply = Encode(Run(SmallProblem()), backend_.info(), clock_.Now(), progress_);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(reply.bytes.Dump(&slices).ok());
  reply.bytes.Clear();
  while (slices.size() > 1) {
    slices.erase(slices.begin());
    EXPECT_EQ(staging_.used(), 1024 + 128);
    EXPECT_EQ(admission_.Use().bytes, 1024 + 128);
  }
  slices.clear();
  EXPECT_EQ(staging_.used(), 0);
  EXPECT_EQ(admission_.Use().bytes, 0);
}

TEST_F(EncodeTest, LeavesOutWhatIsNotWanted) {
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.set_want_lse(false);
  Reply reply = Encode(Run(request), backend_.info(), clock_.Now(), progress_);
  EXPECT_EQ(reply.payload_bytes, 1024);
  EXPECT_EQ(EncodeStream(Run(request), backend_.info(), clock_.Now(), 1024, progress_).size(), 2u);
}

TEST_F(EncodeTest, CutsAStreamIntoChunksOfSoManyBytes) {
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.set_want_lse(false);
  const auto messages = EncodeStream(Run(request), backend_.info(), clock_.Now(), 300, progress_);
  ASSERT_EQ(messages.size(), 5u);
  const size_t data[] = {300, 300, 300, 124};
  for (size_t n = 0; n < std::size(data); ++n) {
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(messages[n + 1].Dump(&slices).ok());
    EXPECT_EQ(slices.back().size(), data[n]) << n;
  }
}

TEST_F(EncodeTest, IsTheGeneratedMessage) {
  Problem problem = SmallProblem();
  v1::ForwardResponse expected = ComputeForward(backend_, problem, MakeForward(problem, 1));
  Reply reply = Encode(Run(problem), backend_.info(), clock_.Now(), progress_);
  grpc::Slice flat;
  ASSERT_TRUE(reply.bytes.DumpToSingleSlice(&flat).ok());
  v1::ForwardResponse got;
  ASSERT_TRUE(got.ParseFromArray(flat.begin(), static_cast<int>(flat.size())));
  EXPECT_EQ(got.receipt().backend(), "gated");
  got.clear_receipt();
  EXPECT_EQ(got.SerializeAsString(), expected.SerializeAsString());
}

}  // namespace
}  // namespace attnd
