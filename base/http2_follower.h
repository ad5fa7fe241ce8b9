// Http2Follower: where the gRPC messages of one HTTP/2 connection begin and end in the bytes that
// one side receives, so that the bytes of a chosen message can be put where they are wanted as they
// come from the socket (payload_receiver.h).
//
//   bytes → frames → DATA of a stream → gRPC messages (1 byte compressed, 4 bytes length, bytes)
//
// It reads what peers send before gRPC does and decides nothing: what it does not understand (TLS,
// padded DATA, a frame out of place) makes it lose the connection, and then nothing is placed any
// more. Of a compressed message nothing is placed either.
//
// A stream is found by the address of its first message, which its call holds. Memory is given back
// and used again, so one table of the process knows whose first message came to a place last, and
// whatever else comes to a place makes it forget what was there: bytes of a lost connection
// (ForgetFirstMessages), DATA of a stream that is not known.
//
// Threads: one at a time. Source: RFC 9113 sections 3.4, 4.1 and 6; gRPC over HTTP/2,
// Length-Prefixed-Message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace attnd {

class MessagePlacer {
 public:
  // As much of a message as a placer is shown.
  static constexpr int64_t kBeginning = 48;
  // Where fewer bytes are to come a placer is not asked: a read of its own costs more than the
  // copy.
  static constexpr int64_t kLeastBytes = 16 << 10;

  virtual ~MessagePlacer() = default;
  // Where the message's bytes from `came` on go, in whose place gRPC delivers meaningless ones;
  // null: it delivers all. `index`: of the stream's messages, the first is 0; `beginning` are the
  // first of the `came` bytes that gRPC has already or is about to have.
  virtual std::byte* PlaceOf(int64_t index, absl::Span<const uint8_t> beginning,
                             int64_t message_bytes, int64_t came) = 0;
  // They are all there. Before gRPC delivers the message, or never.
  virtual void OnPlaced(int64_t index) = 0;
};

class Http2Follower {
 public:
  // Received from a client, whose first bytes are the connection preface, or from a server.
  enum class Peer { kClient, kServer };
  // `owner`: what OwnerOf gives.
  explicit Http2Follower(Peer peer, int owner = 0)
      : owner_(owner), preface_(peer == Peer::kClient ? 0 : kPrefaceBytes) {}
  ~Http2Follower();
  Http2Follower(const Http2Follower&) = delete;
  Http2Follower& operator=(const Http2Follower&) = delete;

  // The next bytes, from where gRPC will read them.
  void Feed(absl::Span<const uint8_t> bytes);

  // The next bytes belong there and nowhere else; empty when they must be fed. Skip then tells how
  // many of them have been put there.
  absl::Span<std::byte> Next();
  void Skip(int64_t bytes);

  // Asks `placer` for the place of each further message of the stream whose first message begins at
  // `first_message` in fed memory, one that has begun among them. Gives the stream, 0: there is
  // none.
  uint32_t Place(const void* first_message, MessagePlacer& placer);
  void Forget(uint32_t stream);

  // Bytes of the largest message that has begun since this was asked last.
  int64_t TakeLargest() { return std::exchange(largest_, 0); }

  // Of the messages that have begun and not ended. Those of which nothing has come while the others
  // brought kStillBytes do not count: their calls are over, perhaps, which the other end decides.
  struct Unfinished {
    int64_t lacking = 0, bytes = 0;  // that are to come, and all of theirs
  };
  static constexpr int64_t kStillBytes = 16 << 20;
  Unfinished unfinished() const;
  int64_t finished_bytes() const { return finished_bytes_; }  // of messages that have ended

  // The connection has ended, or cannot be followed any more: nothing is known of its streams.
  void Lose();
  bool lost() const { return lost_; }
  // Of streams with a placer.
  int placing() const { return placing_; }

  // Any thread: whose stream's first message begins there; -1: nobody's.
  static int OwnerOf(const void* first_message);
  // Any thread: these bytes came by a connection that nobody follows, so that no first message that
  // is known stands there any more.
  static void ForgetFirstMessages(absl::Span<const uint8_t> bytes);

 private:
  static constexpr int kPrefaceBytes = 24;
  static constexpr int kFrameHeaderBytes = 9;
  static constexpr int kMessageHeaderBytes = 5;
  // gRPC has fewer calls on a connection. The oldest whose first message has come make room.
  static constexpr size_t kMostStreams = 256;

  struct Stream {
    uint32_t id = 0;
    MessagePlacer* placer = nullptr;
    const void* first_message = nullptr;  // until it has a placer
    int64_t index = -1;                   // of the message that is being received
    int header_got = 0;                   // bytes of its length prefix
    int64_t size = 0, got = 0;            // its bytes, and those that have come
    int64_t came_at = 0;                  // of the connection's bytes of messages
    bool compressed = false;
    std::byte* place = nullptr;  // of its bytes from `place_from` on
    int64_t place_from = 0;
    uint8_t beginning[MessagePlacer::kBeginning];
  };

  // Its address is in the table, or nobody will ask for it.
  static bool FirstHasCome(const Stream& stream) {
    return stream.index > 0 || (stream.index == 0 && (stream.got > 0 || stream.size == 0));
  }

  using Bytes = absl::Span<const uint8_t>;
  void TakePreface(Bytes& bytes);
  void TakeFrameHeader(Bytes& bytes);
  void BeginFrame();
  void TakeFramePayload(Bytes& bytes);
  void TakeData(Stream& stream, Bytes bytes);
  void TakeMessageHeader(Stream& stream, Bytes& bytes);
  void TakeMessage(Stream& stream, Bytes bytes);
  void TakeFirst(Stream& stream, const void* message);
  void DropFirst(Stream& stream);
  void Advance(Stream& stream, int64_t bytes);
  static void AskForPlace(Stream& stream);
  static std::byte* NextPlace(const Stream& stream) {
    return stream.place + (stream.got - stream.place_from);
  }
  void EndFrame();
  Stream* Find(uint32_t id);
  void Add(uint32_t id);
  void Remove(uint32_t id);

  const int owner_;
  bool lost_ = false;
  int preface_;  // bytes of it that have come
  bool settings_came_ = false;
  int header_got_ = 0;
  uint8_t header_[kFrameHeaderBytes];
  // The frame that is being received.
  int64_t frame_left_ = 0;
  uint8_t frame_type_ = 0, frame_flags_ = 0;
  uint32_t frame_stream_ = 0;
  int placing_ = 0;
  int64_t largest_ = 0;  // of those that have begun
  int64_t message_bytes_ = 0, finished_bytes_ = 0;
  std::vector<Stream> streams_;
};

}  // namespace attnd
