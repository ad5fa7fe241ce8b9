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
constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;
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

const std::string kAcknowledgement = Frame(kSettings, kAck, 0);

// A peer and the clock by which it is watched.
class Peer {
 public:
  enum Greeting { kAcknowledges, kDoesNot };
  explicit Peer(Greeting greeting = kAcknowledges) {
    EXPECT_EQ(Read(kPreface + Frame(kSettings, 0, 6)), absl::ZeroDuration());
    Answer(9);
    if (greeting == kDoesNot) return;
    EXPECT_EQ(Read(kAcknowledgement), absl::ZeroDuration());
  }

  absl::Duration Read(const std::string& bytes) {
    work_.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    return EndRead();
  }
  absl::Duration ReadEncrypted(int64_t encrypted, const std::string& bytes) {
    work_.FeedEncrypted(encrypted);
    work_.FeedDecrypted({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    return EndRead();
  }
  absl::Duration EndRead() {
    hold_ = work_.EndRead(
        now_, [this] { return sent_; },
        [this](double frames) {
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
  // It gets so much.
  void Answer(int64_t bytes) { sent_ += bytes; }
  void Wait(absl::Duration time) { now_ += time; }
  WastedWork& work() { return work_; }

 private:
  absl::Time now_ = absl::UnixEpoch();
  double address_ = kAddressHas;
  int64_t sent_ = 0;
  WastedWork::Hold hold_;
  WastedWork work_{kLimits, now_};
};

const std::string kCall = Frame(kHeaders, 0, 300) + Frame(kData, kEndStream, 4000);
const std::string kAbandoned = Frame(kHeaders, 0, 300) + Frame(kReset, 0, 4);
const std::string kCrumb = Frame(kData, 0, 1);
const std::string kPiece = Frame(kContinuation, 0, 1);

TEST(WastedWork, LetsAnybodyCallAsOftenAsTheyWant) {
  Peer peer;
  EXPECT_EQ(peer.Read(kCall, 100000), absl::ZeroDuration());
  const std::string pieces = Frame(kHeaders, 0, 1000) + Frame(kContinuation, kEndHeaders, 1);
  EXPECT_EQ(peer.Read(pieces + Frame(kData, kEndStream, 1), 1000), absl::ZeroDuration());
}

TEST(WastedWork, LetsALargeTransferGoOnWhateverItsPieces) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Peer peer;
  peer.Answer(200 * WastedWork::kAnsweredBytes);
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

const std::string kAnswers[] = {Frame(kWindowUpdate, 0, 4), Frame(kPing, kAck, 8),
                                Frame(kSettings, kAck, 0)};

TEST(WastedWork, LetsAnswersPassThatRepliesExplain) {
  for (const std::string& answer : kAnswers) {
    Peer peer;
    for (int n = 0; n < 10000; ++n) {
      peer.Answer(WastedWork::kAnsweredBytes);
      ASSERT_EQ(peer.Read(answer), absl::ZeroDuration());
    }
    peer.Answer(int64_t{1} << 40);
    EXPECT_EQ(peer.Read(answer, WastedWork::kMostAnswers), absl::ZeroDuration());
  }
}

TEST(WastedWork, LetsAnswersPassThatCallsExplain) {
  Peer peer;
  std::string answers;
  for (int64_t n = 0; n < WastedWork::kAnswersToACall; ++n) answers += kAnswers[n % 3];
  EXPECT_EQ(peer.Read(kCall + answers, 10000), absl::ZeroDuration());
}

TEST(WastedWork, HoldsWhoAnswersWhatHeDidNotGet) {
  for (const std::string& answer : kAnswers) {
    Peer peer;
    peer.Answer(10 * WastedWork::kAnsweredBytes);
    const std::string read = answer + Frame(kData, 0, 5000);  // no crumb
    int reads = 0;
    while (peer.Read(read) == absl::ZeroDuration()) ASSERT_LE(++reads, 100);
    EXPECT_EQ(reads, 10 + WastedWork::kAnswersToACall - 1 + kAddressHas - 1) << "beside greetings";
  }
}

TEST(WastedWork, LetsCallsPassThatFollowTheAcknowledgement) {
  Peer peer(Peer::kDoesNot);
  std::string calls = kAcknowledgement;
  for (int n = 0; n < 1000; ++n) calls += kCall;
  EXPECT_EQ(peer.Read(calls), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(kCall + kAcknowledgement + kCall, 1000), absl::ZeroDuration());
}

TEST(WastedWork, HoldsWhoCallsWithoutLimit) {
  for (bool early : {false, true}) {
    SCOPED_TRACE(early);
    WastedWork work(kLimits, absl::UnixEpoch());
    const std::string greeting =
        kPreface + Frame(kSettings, 0, 6) + (early ? kAcknowledgement : std::string());
    double lacks = 0;
    auto read = [&](const std::string& bytes, int64_t sent) {
      work.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
      work.EndRead(
          absl::UnixEpoch(), [sent] { return sent; },
          [&](double frames) {
            lacks += frames;
            return absl::ZeroDuration();
          });
    };
    read(greeting + kCall, 8);
    EXPECT_EQ(lacks, 1 + WastedWork::kUnlimitedCall);
    for (int n = 0; n < 10; ++n) read(kCall, 9);
    EXPECT_EQ(lacks, 1 + 11 * WastedWork::kUnlimitedCall);
    read(kCall + kAcknowledgement + kCall, 9);
    read(kCall, 9);
    EXPECT_EQ(lacks, 1 + 12 * WastedWork::kUnlimitedCall);
  }
}

// However much it got before.
TEST(WastedWork, HoldsWhoSavesUpAnswers) {
  Peer peer;
  peer.Answer(int64_t{1} << 40);
  std::string answers;
  for (int64_t n = 0; n < WastedWork::kMostAnswers + 2 * kAddressHas; ++n) answers += kAnswers[0];
  EXPECT_EQ(peer.Read(answers), kHeld);
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
  double cost;
};
class WastedWorkFlood : public testing::TestWithParam<Flood> {};

TEST_P(WastedWorkFlood, IsHeldOnceItsWorthIsGone) {
  const Flood& flood = GetParam();
  Peer peer;  // whose settings have cost one
  int reads = 0;
  while (peer.Read(flood.frames) != kHeld) ASSERT_LE(++reads, 1000);
  EXPECT_EQ(reads, static_cast<int>((kAddressHas - 1) / flood.cost));
}

INSTANTIATE_TEST_SUITE_P(
    Each, WastedWorkFlood,
    testing::Values(
        Flood{"Abandoned", kAbandoned, 2},
        Flood{"AbandonedAndAnEndOfNothing", kAbandoned + Frame(kData, kEndStream, 0), 3},
        Flood{"EndsOfNothing", Frame(kData, kEndStream, 5000), 1},
        Flood{"EndsOfACallThatHasEnded", kCall + Frame(kData, kEndStream, 5000), 1},
        Flood{"EmptyHeaders", Frame(kContinuation, 0, 0) + kCall, 1},
        Flood{"PiecesOfHeaders", kPiece + kCall, WastedWork::kPieceCost},
        Flood{"PiecesOfData", Frame(kData, 0, 255) + kCall, WastedWork::kPieceCost},
        Flood{"CancelledAfterAllWasSent", kCall + Frame(kReset, 0, 4), 1},
        Flood{"NeverEnded", Frame(kHeaders, 0, 20), 1}, Flood{"Pings", Frame(kPing, 0, 8), 1},
        Flood{"Settings", Frame(kSettings, 0, 6), 1},
        Flood{"Priorities", Frame(kPriority, 0, 5), 1},
        Flood{"EmptyData", Frame(kData, 0, 0) + Frame(kData, 0, 5000), 1},
        Flood{"PaddedDataBetween", Frame(kData, 8, 1000) + Frame(kPing, 0, 8) + kCall, 1},
        Flood{"Unknown", Frame(99, 0, 100), 1}),
    [](const auto& info) { return info.param.name; });

TEST(WastedWork, FollowsWhatWasDecrypted) {
  Peer peer;
  int reads = 0;
  while (peer.ReadEncrypted(400, kAbandoned) == absl::ZeroDuration()) ++reads;
  EXPECT_EQ(reads, (kAddressHas - 1) / 2) << "the greeting's settings were one";
}

TEST(WastedWork, LetsRecordsComeInPieces) {
  Peer peer;
  for (int n = 0; n < 1000; ++n) {
    for (int piece = 0; piece < 10; ++piece) {
      ASSERT_EQ(peer.ReadEncrypted(500, ""), absl::ZeroDuration()) << n;
    }
    ASSERT_EQ(peer.ReadEncrypted(0, kCall), absl::ZeroDuration()) << n;
  }
}

TEST(WastedWork, CountsRecordsWithNextToNothing) {
  Peer peer;
  int reads = 0;
  while (peer.ReadEncrypted(WastedWork::kFrameBytes * 10, "") == absl::ZeroDuration()) ++reads;
  EXPECT_EQ(reads, (WastedWork::kRecordBytes / WastedWork::kFrameBytes + kAddressHas - 1) / 10);
  const std::string body = Frame(kData, 0, 16000);
  Peer other;
  for (reads = 0;
       other.ReadEncrypted(100 * 23, body.substr(9 + 100 * reads, 100)) == absl::ZeroDuration();) {
    ASSERT_LT(++reads, 150);
  }
}

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
  EXPECT_EQ(reads, WastedWork::kMostCrumbs - 1) << "the greeting was one";
  EXPECT_GT(peer.Read(kCrumb + kCrumb), absl::ZeroDuration());
  EXPECT_EQ(peer.until_bytes(), WastedWork::kEnoughBytes);
  EXPECT_EQ(peer.Read(Frame(kData, 0, 3 * WastedWork::kCrumbBytes)), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(kCrumb), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(Frame(kData, kEndStream, 1)), absl::ZeroDuration());
  EXPECT_EQ(peer.Read(kCrumb, WastedWork::kMostCrumbs), absl::ZeroDuration());
}

// However much it sent before.
TEST(WastedWork, HoldsWhoSavesUpForCrumbs) {
  Peer peer;
  peer.Read(Frame(kData, 0, 1 << 20));
  EXPECT_EQ(peer.Read(kCrumb, WastedWork::kMostCrumbs), absl::ZeroDuration());
  EXPECT_GT(peer.Read(kCrumb), absl::ZeroDuration());
}

TEST(WastedWork, HoldsWhoSendsCrumbsOfAnyKind) {
  const std::string large = Frame(kHeaders, 0, 300);
  for (const std::string& begin : {std::string(), large.substr(0, 50)}) {
    Peer peer;
    peer.Read(begin);
    EXPECT_EQ(peer.Read(begin.empty() ? Frame(kPing, 0, 8) : "x", 10), absl::ZeroDuration());
    EXPECT_GT(peer.Read(begin.empty() ? kAnswers[0] : "x", 20), absl::ZeroDuration());
    EXPECT_EQ(peer.until_bytes(), WastedWork::kEnoughBytes);
  }
}

TEST(WastedWork, LetsCrumbsPassWhenTheyAreFew) {
  Peer peer;
  for (int n = 0; n < 1000; ++n) {
    ASSERT_EQ(peer.Read(Frame(kPing, 0, 8)), absl::ZeroDuration()) << n;
    peer.Wait(WastedWork::kCrumbTime);
  }
}

TEST(WastedWork, LetsThoseWhoBeganTogetherGoOneByOne) {
  Peer peer;
  peer.Read(Frame(kData, 0, 50000).substr(0, 9));
  peer.Read("x", WastedWork::kMostCrumbs);
  std::set<absl::Duration> times;
  for (int n = 0; n < 1000; ++n) {
    times.insert(peer.Read("x"));
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
  EXPECT_EQ(peer.Read(kAbandoned, kAddressHas), kHeld) << "what comes after it";
}

TEST(WastedWork, SaysNothingOfWhatIsNotHttp2) {
  WastedWork work(kLimits, absl::UnixEpoch());
  const std::string bytes(100000, '\x16');
  work.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  for (int n = 0; n < 1000; ++n) {
    work.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), 10});
    const auto hold = work.EndRead(
        absl::UnixEpoch(), [] { return 0; }, [](double) { return kHeld; });
    ASSERT_EQ(hold.time, absl::ZeroDuration());
  }
}

}  // namespace
}  // namespace attnd
