#include "base/http2_follower.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/synchronization/mutex.h"

namespace attnd {
namespace {

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr uint8_t kData = 0, kHeaders = 1, kRstStream = 3, kSettings = 4;
constexpr uint8_t kEndStream = 1;

// Of the streams of the process whose first message has come and that have no placer yet: which
// was last at an address.
class FirstMessages {
 public:
  struct Holder {
    const Http2Follower* follower = nullptr;
    int owner = -1;
    uint32_t stream = 0;
    bool operator==(const Holder& other) const = default;
  };

  static FirstMessages& Get() {
    static auto* messages = new FirstMessages;
    return *messages;
  }
  void Put(const void* message, const Holder& holder) {
    absl::MutexLock lock(&mutex_);
    holders_[message] = holder;
    count_ = holders_.size();
  }
  void Erase(const void* message, const Holder& holder) {
    absl::MutexLock lock(&mutex_);
    auto at = holders_.find(message);
    if (at != holders_.end() && at->second == holder) holders_.erase(at);
    count_ = holders_.size();
  }
  void EraseWithin(absl::Span<const uint8_t> bytes) {
    if (count_ == 0) return;
    absl::MutexLock lock(&mutex_);
    holders_.erase(holders_.lower_bound(bytes.data()),
                   holders_.lower_bound(bytes.data() + bytes.size()));
    count_ = holders_.size();
  }
  Holder Find(const void* message) {
    absl::MutexLock lock(&mutex_);
    auto at = holders_.find(message);
    return at == holders_.end() ? Holder() : at->second;
  }

 private:
  absl::Mutex mutex_;
  absl::btree_map<const void*, Holder> holders_ ABSL_GUARDED_BY(mutex_);
  std::atomic<size_t> count_{0};  // of them
};

uint32_t BigEndian(const uint8_t* bytes, int count) {
  uint32_t value = 0;
  for (int n = 0; n < count; ++n) value = value << 8 | bytes[n];
  return value;
}

}  // namespace

Http2Follower::~Http2Follower() { Lose(); }

void Http2Follower::Lose() {
  for (Stream& stream : streams_) DropFirst(stream);
  streams_ = {};  // its memory too
  placing_ = 0;
  lost_ = true;
}

int Http2Follower::OwnerOf(const void* first_message) {
  return FirstMessages::Get().Find(first_message).owner;
}

void Http2Follower::ForgetFirstMessages(Bytes bytes) { FirstMessages::Get().EraseWithin(bytes); }

void Http2Follower::Feed(Bytes bytes) {
  while (!bytes.empty() && !lost_) {
    if (preface_ < kPrefaceBytes) {
      TakePreface(bytes);
    } else if (frame_left_ > 0) {
      TakeFramePayload(bytes);
    } else {
      TakeFrameHeader(bytes);
    }
  }
}

void Http2Follower::TakePreface(Bytes& bytes) {
  if (bytes.front() != static_cast<uint8_t>(kPreface[preface_++])) return Lose();
  bytes.remove_prefix(1);
}

void Http2Follower::TakeFrameHeader(Bytes& bytes) {
  header_[header_got_++] = bytes.front();
  bytes.remove_prefix(1);
  if (header_got_ < kFrameHeaderBytes) return;
  header_got_ = 0;
  BeginFrame();
}

void Http2Follower::BeginFrame() {
  frame_left_ = BigEndian(header_, 3);
  frame_type_ = header_[3];
  frame_flags_ = header_[4];
  frame_stream_ = BigEndian(header_ + 5, 4) & 0x7fffffff;
  const bool is_settings = frame_type_ == kSettings && frame_stream_ == 0;
  if (!std::exchange(settings_came_, true) && !is_settings) return Lose();
  if (frame_type_ == kData && (frame_flags_ & ~kEndStream) != 0) return Lose();
  if (frame_type_ == kHeaders) Add(frame_stream_);
  if (lost_) return;
  if (frame_left_ == 0) EndFrame();
}

void Http2Follower::TakeFramePayload(Bytes& bytes) {
  const Bytes part = bytes.first(std::min<size_t>(bytes.size(), frame_left_));
  bytes.remove_prefix(part.size());
  frame_left_ -= static_cast<int64_t>(part.size());
  if (frame_type_ == kData) {
    Stream* stream = Find(frame_stream_);
    stream != nullptr ? TakeData(*stream, part) : ForgetFirstMessages(part);
  }
  if (frame_left_ == 0) EndFrame();
}

void Http2Follower::EndFrame() {
  bool ends = frame_type_ == kData || frame_type_ == kHeaders;
  if (frame_type_ == kRstStream || (ends && (frame_flags_ & kEndStream) != 0)) {
    Remove(frame_stream_);
  }
}

void Http2Follower::TakeData(Stream& stream, Bytes bytes) {
  while (!bytes.empty()) {
    if (stream.header_got < kMessageHeaderBytes) {
      TakeMessageHeader(stream, bytes);
      continue;
    }
    const Bytes part = bytes.first(std::min<size_t>(bytes.size(), stream.size - stream.got));
    bytes.remove_prefix(part.size());
    TakeMessage(stream, part);
  }
}

void Http2Follower::TakeMessageHeader(Stream& stream, Bytes& bytes) {
  uint8_t* header = stream.beginning;  // its bytes are not needed yet
  header[stream.header_got++] = bytes.front();
  bytes.remove_prefix(1);
  if (stream.header_got < kMessageHeaderBytes) return;
  ++stream.index;
  stream.compressed = header[0] != 0;
  stream.size = BigEndian(header + 1, 4);
  stream.got = 0;
  stream.came_at = message_bytes_;
  largest_ = std::max(largest_, stream.size);
  stream.place = nullptr;
  if (stream.size == 0) stream.header_got = 0;
}

void Http2Follower::TakeMessage(Stream& stream, Bytes bytes) {
  message_bytes_ += static_cast<int64_t>(bytes.size());
  if (stream.index == 0 && stream.got == 0) TakeFirst(stream, bytes.data());
  const int64_t beginning = std::min(stream.size, MessagePlacer::kBeginning);
  if (stream.got < beginning) {
    const auto part = bytes.first(std::min<size_t>(bytes.size(), beginning - stream.got));
    std::memcpy(stream.beginning + stream.got, part.data(), part.size());
    stream.got += static_cast<int64_t>(part.size());
    bytes.remove_prefix(part.size());
    if (stream.got == beginning) AskForPlace(stream);
  }
  if (stream.place != nullptr && !bytes.empty()) {
    std::memcpy(NextPlace(stream), bytes.data(), bytes.size());
  }
  Advance(stream, static_cast<int64_t>(bytes.size()));
}

void Http2Follower::TakeFirst(Stream& stream, const void* message) {
  stream.first_message = message;
  FirstMessages::Get().Put(message, {this, owner_, stream.id});
}

void Http2Follower::DropFirst(Stream& stream) {
  if (stream.first_message == nullptr) return;
  FirstMessages::Get().Erase(std::exchange(stream.first_message, nullptr),
                             {this, owner_, stream.id});
}

void Http2Follower::Advance(Stream& stream, int64_t bytes) {
  stream.got += bytes;
  stream.came_at = message_bytes_;
  if (stream.got < stream.size) return;
  stream.header_got = 0;
  finished_bytes_ += stream.size;
  if (stream.placer != nullptr && stream.place != nullptr) stream.placer->OnPlaced(stream.index);
}

Http2Follower::Unfinished Http2Follower::unfinished() const {
  Unfinished all;
  for (const Stream& stream : streams_) {
    if (stream.header_got < kMessageHeaderBytes) continue;
    if (message_bytes_ - stream.came_at > kStillBytes) continue;
    all.lacking += stream.size - stream.got;
    all.bytes += stream.size;
  }
  return all;
}

// Of a message whose beginning has come.
void Http2Follower::AskForPlace(Stream& stream) {
  const bool is_worth_it = stream.size - stream.got >= MessagePlacer::kLeastBytes;
  if (stream.placer == nullptr || stream.compressed || !is_worth_it) return;
  const Bytes beginning(stream.beginning, size_t{MessagePlacer::kBeginning});
  stream.place = stream.placer->PlaceOf(stream.index, beginning, stream.size, stream.got);
  stream.place_from = stream.got;
}

absl::Span<std::byte> Http2Follower::Next() {
  if (lost_ || frame_left_ == 0 || frame_type_ != kData || placing_ == 0) return {};
  Stream* stream = Find(frame_stream_);
  if (stream == nullptr || stream->header_got < kMessageHeaderBytes) return {};
  if (stream->place == nullptr) return {};
  const int64_t bytes = std::min(frame_left_, stream->size - stream->got);
  if (bytes < MessagePlacer::kLeastBytes) return {};
  return {NextPlace(*stream), static_cast<size_t>(bytes)};
}

void Http2Follower::Skip(int64_t bytes) {
  Stream& stream = *Find(frame_stream_);
  message_bytes_ += bytes;
  Advance(stream, bytes);
  frame_left_ -= bytes;
  if (frame_left_ == 0) EndFrame();
}

uint32_t Http2Follower::Place(const void* first_message, MessagePlacer& placer) {
  const auto holder = FirstMessages::Get().Find(first_message);
  if (holder.follower != this) return 0;
  Stream* stream = Find(holder.stream);
  if (stream == nullptr) return 0;
  DropFirst(*stream);
  stream->placer = &placer;
  ++placing_;
  const bool has_begun = stream->index > 0 && stream->got >= MessagePlacer::kBeginning;
  if (has_begun) AskForPlace(*stream);  // of one that is over nothing is to come
  return stream->id;
}

void Http2Follower::Forget(uint32_t id) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->placer == nullptr) return;
  stream->placer = nullptr;
  stream->place = nullptr;  // of a message that has half come: nobody will read it
  --placing_;
}

Http2Follower::Stream* Http2Follower::Find(uint32_t id) {
  for (Stream& stream : streams_) {
    if (stream.id == id) return &stream;
  }
  return nullptr;
}

// Also of trailers, whose stream there is already.
void Http2Follower::Add(uint32_t id) {
  if (id == 0) return Lose();
  if (Find(id) != nullptr) return;
  if (streams_.size() == kMostStreams) {
    auto over = [](const Stream& stream) {
      return FirstHasCome(stream) && stream.placer == nullptr;
    };
    auto oldest = std::find_if(streams_.begin(), streams_.end(), over);
    if (oldest == streams_.end()) return Lose();  // a first message would go unnoticed
    Remove(oldest->id);
  }
  streams_.emplace_back().id = id;
}

void Http2Follower::Remove(uint32_t id) {
  Forget(id);
  if (Stream* stream = Find(id); stream != nullptr) DropFirst(*stream);
  auto is_it = [id](const Stream& stream) { return stream.id == id; };
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), is_it), streams_.end());
}

}  // namespace attnd
