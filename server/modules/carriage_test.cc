#include "server/modules/carriage.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace attnd {
namespace {

class CarriageTest : public ::testing::Test {
 protected:
  static constexpr int kX = 20, kY = 21;
  static constexpr int64_t kBytes = 2 * kChunkBytes + 5;

  // x of three chunks, and y, which is not to be received.
  std::vector<PlacedPayload> Placed() {
    const auto block = std::make_shared<const StagedPayload>();
    return {{{kX, "x", kBytes, true}, memory_.data(), block},
            {{kY, "y", kBytes, false}, memory_.data(), block}};
  }
  absl::Status Land(uint64_t field, uint64_t offset, int64_t bytes) {
    const auto place = carriage_.Claim(field, offset, bytes);
    if (!place.ok()) return place.status();
    EXPECT_EQ(place->to, memory_.data() + offset);
    carriage_.Landed(bytes);
    return absl::OkStatus();
  }
  void LandAll() {
    EXPECT_TRUE(Land(kX, 2 * kChunkBytes, 5).ok());
    EXPECT_TRUE(Land(kX, 0, kChunkBytes).ok());
    EXPECT_TRUE(Land(kX, kChunkBytes, kChunkBytes).ok());
  }
  static CallWait Patient() { return {{}, SteadyNow() + absl::Seconds(60)}; }
  static CallWait Brief() { return {{}, SteadyNow() + absl::Milliseconds(20)}; }

  std::vector<std::byte> memory_ = std::vector<std::byte>(kBytes);
  Carriage carriage_;
};

TEST_F(CarriageTest, TakesEachChunkOnceInAnyOrder) {
  ASSERT_TRUE(carriage_.Admit(Placed()).ok());
  EXPECT_EQ(carriage_.input_bytes(), kBytes);
  LandAll();
  EXPECT_TRUE(carriage_.AwaitLanded(Patient()).ok());
}

TEST_F(CarriageTest, RefusesWhatIsNoChunkOfTheCalls) {
  EXPECT_TRUE(absl::IsInvalidArgument(Land(kX, 0, kChunkBytes)));  // not admitted
  ASSERT_TRUE(carriage_.Admit(Placed()).ok());
  ASSERT_TRUE(Land(kX, 0, kChunkBytes).ok());
  struct Wrong {
    uint64_t field, offset;
    int64_t bytes;
  };
  for (const Wrong& one :
       {Wrong{kX, 0, kChunkBytes}, Wrong{kX, kChunkBytes, 5},
        Wrong{kX, kChunkBytes + 1, kChunkBytes}, Wrong{kX, 2 * kChunkBytes, 6},
        Wrong{kX, 3 * kChunkBytes, 1}, Wrong{kX, kChunkBytes, 0},
        Wrong{kX, UINT64_MAX, kChunkBytes}, Wrong{kY, 0, kChunkBytes}, Wrong{99, 0, kChunkBytes}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Land(one.field, one.offset, one.bytes)))
        << one.field << " " << one.offset << " " << one.bytes;
  }
}

TEST_F(CarriageTest, MissesBytesOnceNobodyBringsThem) {
  ASSERT_TRUE(carriage_.Admit(Placed()).ok());
  ASSERT_TRUE(Land(kX, 0, kChunkBytes).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(carriage_.AwaitLanded(Patient())));  // it has not sent all
  ASSERT_TRUE(carriage_.AwaitAdmitted(Patient()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(carriage_.AwaitLanded(Brief())));  // another may bring them
  std::thread other([&] { carriage_.BroughtAll(absl::OkStatus()); });
  EXPECT_TRUE(absl::IsCancelled(carriage_.AwaitLanded(Patient())));  // some may have been lost
  other.join();
}

TEST_F(CarriageTest, FailsWhereAStreamThatBringsChunksBreaks) {
  ASSERT_TRUE(carriage_.Admit(Placed()).ok());
  ASSERT_TRUE(carriage_.AwaitAdmitted(Patient()).ok());
  std::thread other([&] { carriage_.BroughtAll(absl::CancelledError("gone")); });
  EXPECT_TRUE(absl::IsCancelled(carriage_.AwaitLanded(Patient())));
  other.join();
}

// All that it might have brought is there.
TEST_F(CarriageTest, GoesOnWithoutAStreamThatBreaksLate) {
  ASSERT_TRUE(carriage_.Admit(Placed()).ok());
  ASSERT_TRUE(carriage_.AwaitAdmitted(Patient()).ok());
  LandAll();
  carriage_.BroughtAll(absl::CancelledError("gone"));
  EXPECT_TRUE(carriage_.AwaitLanded(Patient()).ok());
}

TEST_F(CarriageTest, StreamsWaitForTheCallAndForItsReply) {
  std::thread call([&] {
    EXPECT_TRUE(carriage_.Admit(Placed()).ok());
    LandAll();
    EXPECT_TRUE(carriage_.AwaitLanded(Patient()).ok());
    carriage_.Leave(std::make_shared<ChunkQueue>(std::vector<ChunkQueue::Tensor>{
        {kX, memory_.data(), kBytes, nullptr}, {kY, memory_.data(), kBytes, nullptr}}));
  });
  EXPECT_TRUE(carriage_.AwaitAdmitted(Patient()).ok());
  carriage_.BroughtAll(absl::OkStatus());
  const auto chunks = carriage_.AwaitLeaving(Patient());
  call.join();
  ASSERT_TRUE(chunks.ok());
  size_t bytes = 0;
  int count = 0;
  while (std::optional<grpc::ByteBuffer> chunk = (*chunks)->Next()) {
    bytes += chunk->Length();
    ++count;
  }
  EXPECT_EQ(count, 6);  // of x and y
  EXPECT_GT(bytes, 2 * kBytes);
}

TEST_F(CarriageTest, EndsStreamsWithTheCall) {
  ASSERT_TRUE(carriage_.Admit(Placed()).ok());
  ASSERT_TRUE(carriage_.AwaitAdmitted(Patient()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(carriage_.AwaitLeaving(Brief()).status()));
  carriage_.End();
  EXPECT_TRUE(absl::IsCancelled(carriage_.Claim(kX, 0, kChunkBytes).status()));
  EXPECT_TRUE(absl::IsCancelled(carriage_.AwaitLeaving(Patient()).status()));
  EXPECT_TRUE(absl::IsCancelled(carriage_.AwaitAdmitted(Patient())));
  EXPECT_TRUE(absl::IsInvalidArgument(carriage_.Admit(Placed())));
}

TEST(Carriages, AreOfACallerAndGoWithTheirStreams) {
  Carriages carriages;
  const std::shared_ptr<Carriage> one = carriages.Of("a", "n");
  EXPECT_EQ(carriages.Of("a", "n"), one);
  EXPECT_NE(carriages.Of("b", "n"), one);
  EXPECT_NE(carriages.Of("a", "m"), one);
  ASSERT_TRUE(one->Admit({}).ok());
  std::shared_ptr<Carriage> other = carriages.Of("a", "m");
  ASSERT_TRUE(other->Admit({}).ok());
  other = nullptr;
  EXPECT_TRUE(carriages.Of("a", "m")->Admit({}).ok());  // another
}

}  // namespace
}  // namespace attnd
