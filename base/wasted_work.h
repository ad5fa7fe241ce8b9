// WastedWork: how much of what one HTTP/2 client sends asks for nothing, and how long it should
// not be read for that.
//
// Two kinds make a server work for nothing, and others wait meanwhile (docs/PERFORMANCE.md,
// Floods):
//   frames   A call costs one when it begins and gives it back when the client has sent all of it.
//            gRPC 1.51 limits calls at a time once the client acknowledges its settings; until
//            then, or when that came before the settings, each costs kUnlimitedCall besides.
//            One reset, a setting, a ping, a priority, an end of no call, an empty or an unknown
//            frame costs one, and so do kFrameBytes of headers beyond what a call may have; a piece
//            of less than kFrameBytes of data or headers that does not end them, kPieceCost. A
//            connection may waste `frames_per_second`, and what it lacks it takes from its address
//            (held_peers.h). Window updates and acknowledgements answer to what the client got:
//            they are free as far as that explains them, kAnswersToACall for each call that it has
//            sent whole and one for each kAnsweredBytes.
//   crumbs   Reads that bring a few bytes and neither end a call nor answer: kMostCrumbs of them
//            without larger ones, or kCrumbTime, between them. From then on, as long as a read
//            brings fewer than kCrumbBytes, the client is read when kEnoughBytes are there, or what
//            a frame of as many lacks, and otherwise every two to three seconds (crumb_hold), not
//            all of a crowd at once.
//
// Of TLS also what brings no HTTP/2 (key updates, records of a byte): kFrameBytes more than what it
// brings cost one, beyond a record that is still coming.
//
// It looks at frame headers alone, so nothing that a peer does in between hides a frame. What does
// not begin as HTTP/2 is not looked at.
//
// Threads: one at a time. Source: RFC 9113 sections 3.4, 4.1 and 6.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace attnd {

// What may be wasted: grows with time, and what kBurstSeconds bring is the most.
class FrameBudget {
 public:
  static constexpr double kBurstSeconds = 2;

  FrameBudget(double frames, double per_second, absl::Time now)
      : frames_(frames), per_second_(per_second), grown_at_(now) {}

  void Grow(absl::Time now);
  void Add(double frames) { frames_ = std::min(frames_ + frames, per_second_ * kBurstSeconds); }
  double frames() const { return frames_; }  // below 0: a debt
  bool full() const { return frames_ >= per_second_ * kBurstSeconds; }

 private:
  double frames_, per_second_;
  absl::Time grown_at_;
};

class WastedWork {
 public:
  struct Limits {
    double frames_per_second = 0;  // 0: whatever they want
    int64_t header_bytes = 16 << 10;
    absl::Duration crumb_hold = absl::Seconds(3);  // the longest
  };
  // Not to be read for `time`, if that is not zero, or until so many bytes are there.
  struct Hold {
    absl::Duration time;
    int64_t until_bytes = std::numeric_limits<int64_t>::max();
  };
  static constexpr int64_t kFrameBytes = 256;
  static constexpr double kPieceCost = 0.25, kUnlimitedCall = 32;
  static constexpr int64_t kAnswersToACall = 4, kAnsweredBytes = 1024, kMostAnswers = 16384;
  static constexpr int64_t kMostCrumbs = 16, kCrumbBytes = 256, kEnoughBytes = 1024;
  static constexpr absl::Duration kCrumbTime = absl::Seconds(4);
  static constexpr int64_t kRecordBytes = 20 << 10;  // of TLS, at most

  // Times: of any clock that does not go back.
  WastedWork(const Limits& limits, absl::Time now);

  // The next bytes from the peer; or so many that lie within a DATA frame.
  void Feed(absl::Span<const uint8_t> bytes);
  void Skip(int64_t bytes);
  // The same of TLS: so many have come, and later what was in them.
  void FeedEncrypted(int64_t bytes);
  void FeedDecrypted(absl::Span<const uint8_t> bytes);
  // After each read. `sent()` says how many bytes the client has got so far, `take(frames)` for how
  // long who lacks so many is to be held.
  template <class Sent, class Take>
  Hold EndRead(absl::Time now, Sent sent, Take take) {
    if (!is_limited_) TakeUnlimitedCalls(acknowledges_ && sent() >= kFrameHeaderBytes);
    if (answers_ < 0) TakeAnswers(sent());
    if (unexplained_ > kRecordBytes) TakeUnexplained();
    const Hold crumbs = TakeCrumbs(now);
    if (budget_.frames() >= 0) return crumbs;
    budget_.Grow(now);
    const double lacking = -budget_.frames();
    if (lacking <= 0) return crumbs;
    budget_.Add(lacking);
    const absl::Duration debt = take(lacking);
    return debt > absl::ZeroDuration() ? Hold{debt} : crumbs;
  }

 private:
  static constexpr int kPrefaceBytes = 24, kFrameHeaderBytes = 9;
  void Follow(absl::Span<const uint8_t> bytes);
  void TakeHeaderByte(uint8_t byte);
  void BeginFrame();
  double CostOfFrame() const;
  void TakePayload(int64_t bytes);
  void EndCall();
  void TakeUnlimitedCalls(bool is_limited);
  void TakeAnswers(int64_t sent);
  void TakeUnexplained();
  Hold TakeCrumbs(absl::Time now);

  const Limits limits_;
  bool is_http2_ = true;
  int preface_ = 0, header_got_ = 0;  // bytes of them that have come
  uint8_t header_[kFrameHeaderBytes];
  // The frame that is being received.
  int64_t frame_bytes_ = 0, frame_left_ = 0;
  uint8_t frame_type_ = 0, frame_flags_ = 0;
  int64_t headers_ = 0;     // bytes of the block of headers
  int64_t open_calls_ = 0;  // of which more must come

  FrameBudget budget_;
  bool is_limited_ = false;            // in calls at a time
  int64_t answers_ = kAnswersToACall;  // that may come
  int64_t answered_ = 0;               // bytes of what it got
  int64_t unexplained_ = 0;            // encrypted bytes, beyond what was in them
  // Of the current read.
  int64_t bytes_ = 0;
  bool ends_call_ = false, answers_now_ = false, acknowledges_ = false;
  int64_t calls_before_ = 0, calls_after_ = 0;      // its acknowledgement
  double crumb_bytes_ = kMostCrumbs * kCrumbBytes;  // that it may leave out
  absl::Time grown_at_;
};

}  // namespace attnd
