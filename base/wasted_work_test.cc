#include "base/wasted_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

namespace attnd {
namespace {

constexpr uint8_t kData = 0, kHeaders = 1, kPriority = 2, kReset = 3, kSettings = 4, kPing = 6,
                  kWindowUpdate = 8, kContinuation = 9;
constexpr uint8_t kEndStream = 1, kAck = 1;
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr WastedWork::Limits kLimits = {.frames_per_second = 100, .header_bytes = 1000};
constexpr int kAddressHas = 50;  // frames that its address has
constexpr absl::Duration kHeld = absl::Milliseconds(700);

std::string Frame(uint8_t type, uint8_t flags, size_t bytes) {
  std::string frame;
  for (int shift : {16, 8, 0}) frame += static_cast<char>(bytes >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  return frame + std::string("\0\0\0\1", 4) + std::string(bytes, 'x');
}

// A peer and the clock by which it is watched.
class Peer {
 public:
  Peer() { EXPECT_EQ(Read(kPreface + Frame(kSettings, 0, 6)), absl::ZeroDuration()); }

  absl::Duration Read(const std::string& bytes) {
    work_.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    hold_ = work_.EndRead(now_, [this](double frames) {
      address_ -= frames;
      return address_ < 0 ? kHeld : absl::ZeroDuration();
    });
    return hold_.time;
  }
  absl::Duration Read(const std::string& bytes, int times) {
    absl::Duration longest;
    for (int n = 0; n < times; ++n) longest = std::max(longest, Read(bytes));
    return longest;
  }
  // The bytes that end the last hold.
  int64_t until_bytes() const { return hold_.until_bytes; }
  void Wait(absl::Duration time) { now_ += time; }
  WastedWork& work() { return work_; }

 private:
  absl::Time now_ = absl::UnixEpoch();
  double address_ = kAddressHas;
  WastedWork::Hold hold_;
  WastedWork work_{kLimits, now_};
};

const std::string kCall = Frame(kHeaders, 0, 300) + Frame(kData, kEndStream, 4000);
const std::string kAbandoned = Frame(kHeaders, 0, 300) + Frame(kReset, 0, 4);
const std::string kCrumb = Frame(kData, 0, 1);

TEST(WastedWork, LetsAnybodyCallAsOftenAsTheyWant) {
  Peer peer;
  EXPECT_EQ(peer.Read(kCall, 100000), absl::ZeroDuration());
}

TEST(WastedWork, LetsALargeTransferGoOnWhateverItsPieces) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Peer peer;
  std::string stream = Frame(kHeaders, 0, 300);
  for (int n = 0; n < 200; ++n) {
    stream += Frame(kData, 0, 1 + random() % 60000) + Frame(kWindowUpdate, 0, 4);
  }
  for (size_t at = 0, size = 0; at < stream.size(); at += size) {
    size = random() % 3 == 0 ? 1 + random() % 30 : 1 + random() % 100000;
    ASSERT_EQ(peer.Read(stream.substr(at, size)), absl::ZeroDuration()) << at;
  }
}

TEST(WastedWork, LetsCancelledCallsGoNowAndThen) {
  Peer peer;
  for (int n = 0; n < 1000; ++n) {
    ASSERT_EQ(peer.Read(kAbandoned + kCall), absl::ZeroDuration()) << n;
    ASSERT_EQ(peer.Read(kCall + Frame(kReset, 0, 4)), absl::ZeroDuration()) << n;
    peer.Wait(absl::Milliseconds(50));
  }
}

TEST(WastedWork, LetsBytesThatMeanNothingToACallPassWhereRepliesBringThem) {
  Peer peer;
  EXPECT_EQ(peer.Read(Frame(kWindowUpdate, 0, 4), 10000), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(Frame(kPing, kAck, 8), 10000), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(Frame(kSettings, kAck, 0), 10000), absl::ZeroDuration());
}

TEST(WastedWork, LetsLargeHeadersGoOnceButNotAgainAndAgain) {
  Peer peer;
  EXPECT_EQ(peer.Read(Frame(kHeaders, 0, 1000) + Frame(kData, kEndStream, 10), 100),
            absl::ZeroDuration());
  EXPECT_EQ(peer.Read(Frame(kHeaders, 0, 1000 + 40 * WastedWork::kFrameBytes) +
                      Frame(kData, kEndStream, 10)),
            absl::ZeroDuration());
  EXPECT_GT(
      peer.Read(Frame(kHeaders, 0, 1000) + Frame(kContinuation, 0, 40 * WastedWork::kFrameBytes)),
      absl::ZeroDuration());
}

struct Flood {
  const char* name;
  std::string frames;
  int cost;
};
class WastedWorkFlood : public testing::TestWithParam<Flood> {};

TEST_P(WastedWorkFlood, IsHeldOnceItsWorthIsGone) {
  const Flood& flood = GetParam();
  Peer peer;  // whose settings have cost one
  int reads = 0;
  while (peer.Read(flood.frames) == absl::ZeroDuration()) ASSERT_LE(++reads, kAddressHas);
  EXPECT_EQ(reads, (kAddressHas - 1) / flood.cost);
}

INSTANTIATE_TEST_SUITE_P(
    Each, WastedWorkFlood,
    testing::Values(
        Flood{"Abandoned", kAbandoned, 2},
        Flood{"AbandonedAndAnEndOfNothing", kAbandoned + Frame(kData, kEndStream, 0), 2},
        Flood{"CancelledAfterAllWasSent", kCall + Frame(kReset, 0, 4), 1},
        Flood{"NeverEnded", Frame(kHeaders, 0, 20), 1}, Flood{"Pings", Frame(kPing, 0, 8), 1},
        Flood{"Settings", Frame(kSettings, 0, 6), 1},
        Flood{"Priorities", Frame(kPriority, 0, 5), 1},
        Flood{"EmptyData", Frame(kData, 0, 0) + Frame(kData, 0, 5000), 1},
        Flood{"PaddedDataBetween", Frame(kData, 8, 100) + Frame(kPing, 0, 8) + kCall, 1},
        Flood{"Unknown", Frame(99, 0, 100), 1}),
    [](const auto& info) { return info.param.name; });

TEST(WastedWork, HasWhatTimeBringsBeforeItsAddressIsAsked) {
  Peer peer;
  EXPECT_EQ(peer.Read(kAbandoned, kAddressHas), kHeld);
  peer.Wait(absl::Seconds(1));
  EXPECT_EQ(peer.Read(kAbandoned, 50), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(kAbandoned), kHeld);
  peer.Wait(absl::Hours(1));
  EXPECT_EQ(peer.Read(kAbandoned, 101), absl::ZeroDuration()) << "two seconds' worth";
  EXPECT_EQ(peer.Read(kAbandoned), kHeld);
}

TEST(WastedWork, HoldsWhoSendsCrumbsUntilMoreComesAtOnce) {
  Peer peer;
  peer.Read(Frame(kHeaders, 0, 300));
  int reads = 0;
  while (peer.Read(kCrumb) == absl::ZeroDuration()) ASSERT_LE(++reads, 2 * WastedWork::kMostCrumbs);
  EXPECT_EQ(reads, WastedWork::kMostCrumbs);
  EXPECT_GT(peer.Read(kCrumb + kCrumb), absl::ZeroDuration());
  EXPECT_EQ(peer.until_bytes(), WastedWork::kEnoughBytes);
  EXPECT_EQ(peer.Read(Frame(kData, 0, 3 * WastedWork::kCrumbBytes)), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(kCrumb), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(Frame(kData, kEndStream, 1)), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(kCrumb, WastedWork::kMostCrumbs), absl::ZeroDuration());
}

TEST(WastedWork, LetsThoseWhoBeganTogetherGoOneByOne) {
  Peer peer;
  peer.Read(kCrumb, WastedWork::kMostCrumbs);
  std::set<absl::Duration> times;
  for (int n = 0; n < 1000; ++n) {
    times.insert(peer.Read(kCrumb));
    peer.Wait(absl::Nanoseconds(1));
  }
  EXPECT_EQ(times.size(), 1000u);
  EXPECT_EQ(*times.begin(), kLimits.crumb_hold * (2.0 / 3));
  EXPECT_LT(*times.rbegin(), kLimits.crumb_hold);
}

// By the rest of small ones it would be read every few bytes.
TEST(WastedWork, LetsTheRestOfALargeFrameEndAHoldAndItsEndBeNoCrumb) {
  constexpr int64_t kEnough = WastedWork::kEnoughBytes;
  for (int64_t bytes : {kEnough - 1, kEnough, 2 * kEnough}) {
    SCOPED_TRACE(bytes);
    Peer peer;
    peer.Read(kCrumb, WastedWork::kMostCrumbs + 1);
    const std::string frame = Frame(kData, 0, static_cast<size_t>(bytes));
    peer.Read(frame.substr(0, 9));
    for (int64_t left = bytes - 1; left > 0; --left) {
      EXPECT_GT(peer.Read("x"), absl::ZeroDuration());
      EXPECT_EQ(peer.until_bytes(), bytes < kEnough ? kEnough : std::min(left, kEnough));
    }
    EXPECT_EQ(peer.Read("x") > absl::ZeroDuration(), bytes < kEnough);
    EXPECT_GT(peer.Read(kCrumb), absl::ZeroDuration());
    EXPECT_EQ(peer.until_bytes(), kEnough);
  }
}

TEST(WastedWork, CountsWhatWasReadElsewhere) {
  Peer peer;
  const std::string large = Frame(kData, 0, 1 << 20);
  for (int n = 0; n < 1000; ++n) {
    EXPECT_EQ(peer.Read(large.substr(0, 50)), absl::ZeroDuration());
    peer.work().Skip((1 << 20) + 9 - 50);
    EXPECT_EQ(peer.Read(""), absl::ZeroDuration());
  }
}

TEST(WastedWork, SaysNothingOfWhatIsNotHttp2) {
  WastedWork work(kLimits, absl::UnixEpoch());
  const std::string bytes(100000, '\x16');
  work.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  EXPECT_EQ(work.EndRead(absl::UnixEpoch(), [](double) { return kHeld; }).time,
            absl::ZeroDuration());
}

}  // namespace
}  // namespace attnd
