#include "base/http2_follower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace attnd {
namespace {

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr int kData = 0, kHeaders = 1, kRst = 3, kSettings = 4, kWindowUpdate = 8;

std::string Number(uint64_t value, int bytes) {
  std::string text;
  for (int n = bytes - 1; n >= 0; --n) text += static_cast<char>(value >> (8 * n));
  return text;
}
std::string Frame(int type, int flags, uint32_t stream, const std::string& payload) {
  return Number(payload.size(), 3) + Number(type, 1) + Number(flags, 1) + Number(stream, 4) +
         payload;
}
std::string Message(const std::string& bytes, int compressed = 0) {
  return Number(compressed, 1) + Number(bytes.size(), 4) + bytes;
}
std::string Start(uint32_t stream) {
  return Frame(kSettings, 0, 0, "") + Frame(kHeaders, 4, stream, "headers");
}
std::string Random(size_t size, std::mt19937& random) {
  std::string bytes(size, 0);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Puts each message that is larger than `least` into memory of its own.
class Collector final : public MessagePlacer {
 public:
  explicit Collector(int64_t least = 0) : least_(least) {}
  std::byte* PlaceOf(int64_t index, absl::Span<const uint8_t> beginning, int64_t message_bytes,
                     int64_t came) override {
    beginnings[index] = std::string(beginning.begin(), beginning.end());
    if (message_bytes < least_) return nullptr;
    delivered[index] = static_cast<size_t>(came);
    memory[index].resize(static_cast<size_t>(message_bytes - came));
    return reinterpret_cast<std::byte*>(memory[index].data());
  }
  void OnPlaced(int64_t index) override { placed.push_back(index); }

  std::map<int64_t, std::string> memory, beginnings;
  std::map<int64_t, size_t> delivered;
  std::vector<int64_t> placed;

 private:
  const int64_t least_;
};

// Gives `bytes` as a socket would, in pieces: straight where the follower wants them, the rest by
// way of memory that stays. Returns how many went straight.
class Wire {
 public:
  Wire(Http2Follower& follower, std::mt19937& random) : follower_(follower), random_(random) {}
  int64_t Give(const std::string& bytes) {
    int64_t straight = 0;
    fed_.push_back(bytes);
    const std::string& all = fed_.back();
    for (size_t at = 0; at < all.size();) {
      size_t piece =
          std::min<size_t>(1 + random_() % (random_() % 3 == 0 ? 30 : 60000), all.size() - at);
      if (auto place = follower_.Next(); !place.empty()) {
        piece = std::min(piece, place.size());
        std::memcpy(place.data(), all.data() + at, piece);
        follower_.Skip(static_cast<int64_t>(piece));
        straight += static_cast<int64_t>(piece);
      } else {
        follower_.Feed({reinterpret_cast<const uint8_t*>(all.data()) + at, piece});
      }
      at += piece;
    }
    return straight;
  }
  // Of the text that was given last.
  const void* At(size_t offset) const { return fed_.back().data() + offset; }

 private:
  Http2Follower& follower_;
  std::mt19937& random_;
  std::vector<std::string> fed_ = [] {
    std::vector<std::string> list;
    list.reserve(100);  // so that texts stay where they are
    return list;
  }();
};

// Of a connection from a server: stream 1, with a placer since its first message.
struct PlacedStream {
  explicit PlacedStream(int64_t least = 0) : collector(least) {
    wire.Give(Start(1));
    wire.Give(Frame(kData, 0, 1, Message("header")));
    EXPECT_EQ(follower.Place(wire.At(9 + 5), collector), 1u);
  }
  std::mt19937 random{1};
  Http2Follower follower{Http2Follower::Peer::kServer};
  Wire wire{follower, random};
  Collector collector;
};

TEST(Http2Follower, PutsMessagesInTheirPlaceHoweverTheyAreCut) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int64_t straight = 0;
  for (int round = 0; round < 50; ++round) {
    Http2Follower follower(Http2Follower::Peer::kClient);
    Wire wire(follower, random);
    std::string before = kPreface + Start(1) + Frame(kHeaders, 4, 3, "headers");
    wire.Give(before);
    std::string first = Frame(kData, 0, 3, Message("first"));
    wire.Give(first);
    const void* first_at = wire.At(9 + 5);
    Collector collector;
    ASSERT_EQ(follower.Place(first_at, collector), 3u);
    std::vector<std::string> sent;
    std::string messages;
    for (int n = 0; n < 5; ++n) {
      sent.push_back(Random(random() % 3 == 0 ? random() % 60 : random() % 200000, random));
      messages += Message(sent.back());
    }
    std::string frames;
    for (size_t at = 0; at < messages.size();) {
      size_t size = std::min<size_t>(random() % 100000, messages.size() - at);
      frames += Frame(kData, 0, 3, messages.substr(at, size));
      if (random() % 2 == 0) frames += Frame(kWindowUpdate, 0, 0, "1234");
      if (random() % 3 == 0) frames += Frame(kData, 0, 1, Random(random() % 9, random));
      at += size;
    }
    straight += wire.Give(frames);
    std::vector<int64_t> placed;
    for (size_t n = 0; n < sent.size(); ++n) {
      const auto index = static_cast<int64_t>(n) + 1;
      if (collector.memory.count(index) == 0) continue;
      placed.push_back(index);
      EXPECT_EQ(collector.memory[index], sent[n].substr(collector.delivered[index]));
    }
    EXPECT_EQ(collector.placed, placed);
    for (size_t n = 0; n < sent.size(); ++n) {
      const bool is_large =
          sent[n].size() >= MessagePlacer::kLeastBytes + MessagePlacer::kBeginning;
      EXPECT_EQ(collector.memory.count(static_cast<int64_t>(n) + 1), is_large);
    }
    EXPECT_FALSE(follower.lost());
  }
  EXPECT_GT(straight, 0);
}

TEST(Http2Follower, ShowsAPlacerTheBeginningAndTakesNoForAnAnswer) {
  PlacedStream stream(int64_t{1} << 30);
  auto& [random, follower, wire, collector] = stream;
  const std::string large = Random(100000, random);
  EXPECT_EQ(wire.Give(Frame(kData, 0, 1, Message("short") + Message(large))), 0);
  EXPECT_EQ(collector.beginnings.count(1), 0u) << "it was asked about a small message";
  EXPECT_EQ(collector.beginnings[2], large.substr(0, MessagePlacer::kBeginning));
  EXPECT_TRUE(collector.placed.empty());
}

TEST(Http2Follower, PlacesTheRestOfAMessageThatHasBegun) {
  const size_t least = MessagePlacer::kLeastBytes, beginning = MessagePlacer::kBeginning;
  const size_t cases[][2] = {
      // bytes that have come, and of them what the placer does not get
      {0, beginning},   {beginning - 1, beginning},       {beginning, beginning},
      {50000, 50000},   {100000 - least, 100000 - least}, {100000 - least + 1, 100000},
      {100000, 100000},
  };
  for (const auto& [came, delivered] : cases) {
    std::mt19937 random(1);
    Http2Follower follower(Http2Follower::Peer::kServer);
    Wire wire(follower, random);
    const std::string large = Random(100000, random), message = Message(large), next = large + "n";
    wire.Give(Start(1));
    wire.Give(Frame(kData, 0, 1, Message("header")) +
              Frame(kData, 0, 1, message.substr(0, 5 + came)));
    Collector collector;
    ASSERT_EQ(follower.Place(wire.At(9 + 5), collector), 1u);
    const std::string rest = Frame(kData, 0, 1, message.substr(5 + came));
    wire.Give(rest.substr(0, 9));
    EXPECT_EQ(follower.Next().size(), came < beginning ? 0 : large.size() - delivered) << came;
    wire.Give(rest.substr(9));
    wire.Give(Frame(kData, 0, 1, Message(next)));
    EXPECT_EQ(collector.memory[2], next.substr(beginning)) << came;
    if (delivered == large.size()) {
      EXPECT_EQ(collector.beginnings.count(1), 0u) << came;
      EXPECT_EQ(collector.placed, std::vector<int64_t>{2}) << came;
      continue;
    }
    EXPECT_EQ(collector.beginnings[1], large.substr(0, beginning)) << came;
    EXPECT_EQ(collector.delivered[1], delivered) << came;
    EXPECT_EQ(collector.memory[1], large.substr(delivered)) << came;
    EXPECT_EQ(collector.placed, (std::vector<int64_t>{1, 2})) << came;
  }
}

TEST(Http2Follower, FindsAStreamByItsNewestFirstMessageOnly) {
  std::mt19937 random(1);
  Http2Follower follower(Http2Follower::Peer::kServer);
  const std::string start = Start(1) + Frame(kHeaders, 4, 3, "h");
  follower.Feed({reinterpret_cast<const uint8_t*>(start.data()), start.size()});
  std::string memory(100, 0);
  for (uint32_t stream : {3u, 1u}) {  // the same memory, given back between them
    const std::string frame = Frame(kData, 0, stream, Message("header"));
    memory.assign(frame);  // a copy
    follower.Feed({reinterpret_cast<const uint8_t*>(memory.data()), memory.size()});
  }
  Collector collector;
  EXPECT_EQ(follower.Place(memory.data() + 1, collector), 0u);
  EXPECT_EQ(follower.Place(memory.data() + 9 + 5, collector), 1u);
  EXPECT_EQ(follower.Place(memory.data() + 9 + 5, collector), 0u);
}

TEST(Http2Follower, WritesNothingMoreOnceForgottenAndTellsOfNoHalfMessage) {
  PlacedStream stream;
  auto& [random, follower, wire, collector] = stream;
  const std::string large = Random(100000, random), message = Message(large);
  wire.Give(Frame(kData, 0, 1, message.substr(0, 50000)));
  EXPECT_EQ(follower.placing(), 1);
  follower.Forget(1);
  EXPECT_EQ(follower.placing(), 0);
  collector.memory[1].assign(100000, 'x');
  wire.Give(Frame(kData, 1, 1, message.substr(50000)));
  EXPECT_EQ(collector.memory[1], std::string(100000, 'x'));
  EXPECT_TRUE(collector.placed.empty());
}

TEST(Http2Follower, PlacesNothingOfACompressedMessage) {
  PlacedStream stream;
  auto& [random, follower, wire, collector] = stream;
  EXPECT_EQ(wire.Give(Frame(kData, 0, 1, Message(Random(100000, random), 1))), 0);
  EXPECT_TRUE(collector.beginnings.empty());
}

TEST(Http2Follower, EndsAStreamWithItsLastFrameOrItsReset) {
  for (const std::string& end : {Frame(kData, 1, 1, ""), Frame(kRst, 0, 1, "1234")}) {
    PlacedStream stream;
    auto& [random, follower, wire, collector] = stream;
    wire.Give(end);
    EXPECT_EQ(follower.placing(), 0);
    follower.Forget(1);  // its owner does not know
    EXPECT_EQ(follower.placing(), 0);
  }
}

TEST(Http2Follower, EndsAStreamWithAFrameThatWentStraightToItsPlace) {
  PlacedStream stream;
  auto& [random, follower, wire, collector] = stream;
  EXPECT_GT(wire.Give(Frame(kData, 1, 1, Message(Random(100000, random)))), 0);
  EXPECT_EQ(collector.placed, std::vector<int64_t>({1}));
  EXPECT_EQ(follower.placing(), 0);
}

// It has no address.
TEST(Http2Follower, FindsNoStreamByAnEmptyFirstMessage) {
  std::mt19937 random(1);
  Http2Follower follower(Http2Follower::Peer::kServer, 7);
  Wire wire(follower, random);
  wire.Give(Start(1));
  wire.Give(Frame(kData, 0, 1, Message("") + Message("second")));
  EXPECT_EQ(Http2Follower::OwnerOf(wire.At(9 + 5)), -1);
}

TEST(Http2Follower, TakesTrailersForNoOtherStream) {
  std::string begun = Start(1);
  for (uint32_t n = 1; n < 200; ++n) {
    for (int times = 0; times < 2; ++times) begun += Frame(kHeaders, 4, 2 * n + 1, "h");
  }
  Http2Follower follower(Http2Follower::Peer::kServer);
  follower.Feed({reinterpret_cast<const uint8_t*>(begun.data()), begun.size()});
  EXPECT_FALSE(follower.lost());
}

TEST(Http2Follower, FollowsNoMoreThanSoManyStreamsAndKeepsThoseWithAPlacer) {
  PlacedStream stream;
  auto& [random, follower, wire, collector] = stream;
  std::string others;
  for (uint32_t n = 1; n < 2000; ++n) {
    others += Frame(kHeaders, 4, 2 * n + 1, "h") + Frame(kData, 0, 2 * n + 1, Message("first"));
  }
  wire.Give(others);
  EXPECT_FALSE(follower.lost());
  wire.Give(Frame(kData, 0, 3, Message("header")));  // the oldest has made room
  Collector late;
  EXPECT_EQ(follower.Place(wire.At(9 + 5), late), 0u);
  const std::string large = Random(100000, random);
  wire.Give(Frame(kData, 0, 1, Message(large)));
  EXPECT_EQ(collector.memory[1], large.substr(MessagePlacer::kBeginning));
}

TEST(Http2Follower, IsLostRatherThanMissAFirstMessage) {
  std::string begun = Start(1);
  for (uint32_t n = 1; n < 2000; ++n) begun += Frame(kHeaders, 4, 2 * n + 1, "h");
  Http2Follower follower(Http2Follower::Peer::kServer);
  follower.Feed({reinterpret_cast<const uint8_t*>(begun.data()), begun.size()});
  EXPECT_TRUE(follower.lost());
}

// What makes room must not be a stream whose first message begins with the next byte: it would be
// unknown, and another stream's might have stood where it comes to lie.
TEST(Http2Follower, IsLostRatherThanForgetAStreamBeforeItsFirstByte) {
  std::string begun = Start(1) + Frame(kData, 0, 1, Message("first").substr(0, 5));
  for (uint32_t n = 1; n < 256; ++n) begun += Frame(kHeaders, 4, 2 * n + 1, "h");
  Http2Follower follower(Http2Follower::Peer::kServer);
  follower.Feed({reinterpret_cast<const uint8_t*>(begun.data()), begun.size()});
  EXPECT_FALSE(follower.lost());
  const std::string more = Frame(kHeaders, 4, 999, "h");
  follower.Feed({reinterpret_cast<const uint8_t*>(more.data()), more.size()});
  EXPECT_TRUE(follower.lost());
}

TEST(Http2Follower, ForgetsFirstMessagesWhereUnknownBytesCome) {
  const std::string start = Start(1), frame = Frame(kData, 0, 1, Message("header"));
  const auto bytes = [](const std::string& text) {
    return absl::Span<const uint8_t>(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  const void* const first = frame.data() + 9 + 5;
  const std::function<void(Http2Follower&)> ways[] = {
      [&](Http2Follower&) { Http2Follower::ForgetFirstMessages(bytes(frame)); },
      // DATA of a stream that has no HEADERS, in the same memory.
      [&](Http2Follower& other) { other.Feed(bytes(frame)); },
      [&](Http2Follower& other) {  // the end of the known bytes
        other.Feed(bytes(frame).first(9 + 5));
        Http2Follower::ForgetFirstMessages(bytes(frame).subspan(9 + 5));
      },
  };
  for (const auto& overwrite : ways) {
    Http2Follower follower(Http2Follower::Peer::kServer, 7), other(Http2Follower::Peer::kServer, 8);
    for (Http2Follower* f : {&follower, &other}) f->Feed(bytes(Frame(kSettings, 0, 0, "")));
    follower.Feed(bytes(Frame(kHeaders, 4, 1, "h")));
    follower.Feed(bytes(frame));
    EXPECT_EQ(Http2Follower::OwnerOf(first), 7);
    Http2Follower::ForgetFirstMessages(bytes(frame).first(9 + 5));
    Http2Follower::ForgetFirstMessages(bytes(frame).subspan(9 + 5 + 1));
    EXPECT_EQ(Http2Follower::OwnerOf(first), 7) << "its neighbours";
    overwrite(other);
    EXPECT_EQ(Http2Follower::OwnerOf(first), -1);
    Collector collector;
    EXPECT_EQ(follower.Place(first, collector), 0u);
  }
}

TEST(Http2Follower, KnowsNothingOfItsStreamsOnceItIsLost) {
  PlacedStream stream;
  auto& [random, follower, wire, collector] = stream;
  const std::string message = Message(Random(100000, random));
  wire.Give(Frame(kData, 0, 1, message.substr(0, 50000)));
  wire.Give(Frame(kHeaders, 4, 3, "h") + Frame(kData, 0, 3, Message("header")));
  const void* first = wire.At(9 + 1 + 9 + 5);
  EXPECT_NE(Http2Follower::OwnerOf(first), -1);
  collector.memory[1].assign(100000, 'x');
  wire.Give(Frame(kData, 8, 1, message.substr(50000)));  // padded
  EXPECT_TRUE(follower.lost());
  EXPECT_EQ(follower.placing(), 0);
  EXPECT_EQ(Http2Follower::OwnerOf(first), -1);
  EXPECT_EQ(collector.memory[1], std::string(100000, 'x'));
  EXPECT_TRUE(collector.placed.empty());
  follower.Forget(1);  // its owner does not know
  EXPECT_EQ(follower.placing(), 0);
}

TEST(Http2Follower, FindsAStreamAmongConnectionsThatHaveUsedTheSameMemory) {
  const std::string start = Start(1);
  for (bool ended : {false, true}) {
    Http2Follower refused(Http2Follower::Peer::kServer, 7),
        followed(Http2Follower::Peer::kServer, 8);
    std::string memory(100, 0);
    for (Http2Follower* follower : {&refused, &followed}) {
      follower->Feed({reinterpret_cast<const uint8_t*>(start.data()), start.size()});
      const std::string frame = Frame(kData, ended && follower == &followed, 1, Message("header"));
      memory.assign(frame);  // a copy
      follower->Feed({reinterpret_cast<const uint8_t*>(memory.data()), memory.size()});
    }
    const void* first = memory.data() + 9 + 5;
    Collector collector;
    EXPECT_EQ(refused.Place(first, collector), 0u);
    EXPECT_EQ(Http2Follower::OwnerOf(first), ended ? -1 : 8);
    const std::string reset = Frame(kRst, 0, 1, "1234");
    refused.Feed({reinterpret_cast<const uint8_t*>(reset.data()), reset.size()});
    EXPECT_EQ(Http2Follower::OwnerOf(first), ended ? -1 : 8);
    EXPECT_EQ(followed.Place(first, collector), ended ? 0u : 1u);
  }
}

TEST(Http2Follower, TellsWhatItsUnfinishedMessagesLack) {
  std::mt19937 random(1);
  Http2Follower follower(Http2Follower::Peer::kServer);
  Wire wire(follower, random);
  auto expect = [&follower](int64_t lacking, int64_t bytes, int64_t finished) {
    EXPECT_EQ(follower.unfinished().lacking, lacking);
    EXPECT_EQ(follower.unfinished().bytes, bytes);
    EXPECT_EQ(follower.finished_bytes(), finished);
  };
  wire.Give(Start(1) + Frame(kHeaders, 4, 3, "headers"));
  expect(0, 0, 0);
  const std::string message = Message(std::string(1000, 'x'));
  wire.Give(Frame(kData, 0, 1, message.substr(0, 5)));
  expect(1000, 1000, 0);
  wire.Give(Frame(kData, 0, 3, message + message.substr(0, 405)));
  expect(1600, 2000, 1000);
  wire.Give(Frame(kData, 0, 1, message.substr(5)));
  expect(600, 1000, 2000);
  wire.Give(Frame(kRst, 0, 3, "1234"));
  expect(0, 0, 2000);
}

TEST(Http2Follower, CountsNoMessageOfWhichNothingComesBesideOthers) {
  std::mt19937 random(1);
  Http2Follower follower(Http2Follower::Peer::kServer);
  Wire wire(follower, random);
  wire.Give(Start(1) + Frame(kHeaders, 4, 3, "headers"));
  wire.Give(Frame(kData, 0, 1, Number(0, 1) + Number(1000, 4) + "x"));
  const std::string message = Message(std::string(Http2Follower::kStillBytes / 4, 'x'));
  for (int n = 0; n < 4; ++n) wire.Give(Frame(kData, 0, 3, message));
  EXPECT_EQ(follower.unfinished().lacking, 999);
  wire.Give(Frame(kData, 0, 3, Message("x")));
  EXPECT_EQ(follower.unfinished().lacking, 0);
  wire.Give(Frame(kData, 0, 1, "x"));
  EXPECT_EQ(follower.unfinished().lacking, 998);
}

TEST(Http2Follower, LosesWhatItDoesNotUnderstand) {
  const std::pair<const char*, std::string> cases[] = {
      {"TLS", std::string("\x16\x03\x01\x02", 4) + std::string(40, 'x')},
      {"another preface", std::string("PRI * HTTP/3.0\r\n\r\n")},
      {"no settings first", kPreface + Frame(kHeaders, 4, 1, "h")},
      {"padded data", kPreface + Start(1) + Frame(kData, 8, 1, "1234")},
      {"a stream 0", kPreface + Start(0)},
  };
  for (const auto& [name, bytes] : cases) {
    Http2Follower follower(Http2Follower::Peer::kClient);
    follower.Feed({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    EXPECT_TRUE(follower.lost()) << name;
  }
}

}  // namespace
}  // namespace attnd
